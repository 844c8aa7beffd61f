"""The linear kernel is `F.linear`, and a row's bits do not depend on its company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from chairlift_engine import packed_linear
from chairlift_engine.cpu_kernels import cpu_ops
from chairlift_engine.models import prepare_model
from chairlift_engine.packed_linear import ROW_MULTIPLE, pack_linears
from chairlift_engine.request import Request, SamplingParams
from chairlift_engine.runner import ScheduledChunk
from chairlift_engine.torch_runner import TorchRunner

MAX_ROWS = 70
# (inputs, outputs): around a panel's width and a depth block's length, single ones, ordinary ones.
SHAPES = [(1, 1), (3, 5), (256, 16), (257, 17), (255, 33), (600, 31), (576, 192), (1536, 97)]
NUM_THREADS = (1, 2, 5)

needs_kernel = pytest.mark.usefixtures("kernel")


@pytest.fixture
def kernel() -> None:
    if cpu_ops() is None:
        pytest.skip("no C++ compiler here")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Layer:
    """One linear layer before and after packing, and rows to put through it."""

    def __init__(self, shape: tuple[int, int], bias: bool, exact: bool) -> None:
        torch.manual_seed(0)
        self.plain = nn.Linear(*shape, bias=bias).requires_grad_(False)
        if exact:
            self.plain.weight.copy_(self.plain.weight.bfloat16())
        holder = nn.Sequential(self.plain)
        self.row_multiple = pack_linears(holder)
        self.packed = holder[0]
        self.rows = torch.randn(MAX_ROWS, shape[0])


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("exact", [True, False], ids=["bf16", "fp32"])
def test_it_is_f_linear_with_the_same_bits_for_every_number_of_rows(
    shape: tuple[int, int], bias: bool, exact: bool
) -> None:
    layer = Layer(shape, bias, exact)
    assert layer.row_multiple == 1
    whole = layer.packed(layer.rows)
    plain = layer.plain.double()
    torch.testing.assert_close(
        whole.double(),
        F.linear(layer.rows.double(), plain.weight, plain.bias),
        rtol=1e-5,
        atol=1e-5,
    )
    for num_rows in range(1, MAX_ROWS + 1):
        torch.set_num_threads(NUM_THREADS[num_rows % len(NUM_THREADS)])
        assert torch.equal(layer.packed(layer.rows[:num_rows]), whole[:num_rows])
        assert torch.equal(layer.packed(layer.rows[-num_rows:]), whole[-num_rows:])


@needs_kernel
@pytest.mark.parametrize("num_rows", [1, 192, 193, 400])
def test_rows_cut_into_parts_and_panels_dealt_to_threads_keep_their_bits(num_rows: int) -> None:
    layer = Layer((300, 1000), bias=True, exact=False)
    rows = torch.randn(num_rows, 300)
    one_by_one = torch.cat([layer.packed(row[None]) for row in rows])
    for num_threads in NUM_THREADS:
        torch.set_num_threads(num_threads)
        assert torch.equal(layer.packed(rows), one_by_one)


@needs_kernel
def test_weights_that_bf16_holds_exactly_take_half_the_memory() -> None:
    exact, other = (Layer((300, 64), False, exact).packed._packed for exact in (True, False))
    assert isinstance(exact, Tensor) and isinstance(other, Tensor)
    assert (exact.dtype, other.dtype) == (torch.bfloat16, torch.float32)
    assert exact.nbytes * 2 == other.nbytes


@needs_kernel
def test_any_leading_shape_any_strides_and_no_rows_at_all_are_taken() -> None:
    layer = Layer((20, 7), bias=True, exact=True)
    given = torch.randn(2, 20, 3).transpose(1, 2)
    torch.testing.assert_close(layer.packed(given), layer.plain(given))
    assert layer.packed(torch.empty(1, 0, 20)).shape == (1, 0, 7)


@needs_kernel
def test_a_model_with_other_weights_too_keeps_its_padding() -> None:
    assert pack_linears(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4))) == 1
    assert pack_linears(nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1))) == ROW_MULTIPLE
    assert pack_linears(nn.Sequential(nn.Linear(4, 4).bfloat16())) == ROW_MULTIPLE


def test_without_the_kernel_layers_compute_the_same_and_keep_their_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_linear, "cpu_ops", lambda: None)
    layer = Layer((33, 17), bias=True, exact=True)
    assert layer.row_multiple == ROW_MULTIPLE
    torch.testing.assert_close(layer.packed(layer.rows), layer.plain(layer.rows))


@needs_kernel
def test_a_decoding_rows_logits_are_the_same_bits_in_any_company() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    loaded = prepare_model(transformers.LlamaForCausalLM(config))
    assert loaded.row_multiple == 1
    logits: list[Tensor] = []
    loaded.model.register_forward_hook(lambda _module, _args, out: logits.append(out.logits[0]))
    runner = TorchRunner(loaded, 40, 16)
    requests = [
        Request(str(i), [3 + i, 40, 7 + i, i], SamplingParams(8, temperature=0.0), float(i))
        for i in range(33)
    ]
    for i, each in enumerate(requests):
        each.block_ids = [i + 1]
        runner.execute([ScheduledChunk(each, 0, 3)])
    chunks = [ScheduledChunk(each, 3, 1) for each in requests]
    logits.clear()
    runner.execute(chunks)
    together = logits[0]
    for i in (0, 7, 32):
        for company in ([chunks[i]], [*chunks[:3], chunks[i]], [*chunks[20:], chunks[i]]):
            logits.clear()
            runner.execute(company)
            assert torch.equal(logits[0][-1], together[i])
