"""The engine's HTTP half: an OpenAI-compatible public port and a guarded admin port.

Knows the engine only through `Engine.request_*` and step reports; never sees a runner's insides,
and imports no torch. Start reading at `engine_server.EngineServer.run`, then `public`.
"""
