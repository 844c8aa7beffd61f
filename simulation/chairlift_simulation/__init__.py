"""A whole pool in virtual time: gateway, engines and controller, minutes in seconds."""
