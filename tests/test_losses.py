"""Tests that the loss without logits equals the loss: on one process, sharded, in bf16, compiled; also with prefetching."""

import copy

import pytest
import torch
from arithmetic import Watch, compare_in_bf16, rounding
from helpers import CHILDREN, refuses
from tiny import tiny_config
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers import DoryConfig, Gemma2Config, GraniteConfig, InklingTextConfig, ModernBertDecoderConfig

from accelerate_recipes import losses
from accelerate_recipes.losses import linear_cross_entropy, next_token_loss, next_token_loss_without_logits
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.head_probe import check_head
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.models.weights import initialize
from recipe_tools.plan.ledger import Ledger

BATCH_SIZE, LENGTH, VOCABULARY = 3, 300, 400


def make_model(**overrides):
    settings = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "initializer_range": 0.2}
    return initialize(new_model(tiny_config(**settings | overrides), "sdpa"), 0, "cpu")


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (BATCH_SIZE, LENGTH), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, IGNORE_INDEX, ids)
    labels[0] = IGNORE_INDEX  # a row without targets
    return {"input_ids": ids, "position_ids": torch.arange(LENGTH).expand_as(ids), "labels": labels}


def loss_and_gradients(loss_fn, model) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = loss_fn(model, make_batch())
    (loss / 123).backward()
    assert loss.dtype == torch.float32 and loss.shape == ()
    return loss.item(), {name: parameter.grad.float() for name, parameter in model.named_parameters()}


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients(tied, monkeypatch):
    """In fp32 they are those of whole logits, with several chunks, and several parts of each."""
    monkeypatch.setattr(losses, "LOGITS_IN_FP32", 100 * VOCABULARY)
    model = make_model(tie_word_embeddings=tied)
    (wanted, wanted_gradients), (found, gradients) = (
        loss_and_gradients(loss_fn, model) for loss_fn in (next_token_loss, next_token_loss_without_logits)
    )
    assert found == pytest.approx(wanted, rel=rounding(VOCABULARY))
    for name, gradient in gradients.items():
        assert distance(gradient, wanted_gradients[name]) < rounding(VOCABULARY), name


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bf16(autocast):
    """The loss in bf16 is as near to fp32 as with whole logits; torch's own sum over the tokens would be 1 % off."""
    wanted, wanted_gradients = loss_and_gradients(next_token_loss, make_model())
    model = make_model() if autocast else make_model().bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain, plain_gradients = loss_and_gradients(next_token_loss, model)
        found, gradients = loss_and_gradients(next_token_loss_without_logits, model)
    assert found == pytest.approx(plain, rel=1e-5)
    assert found == pytest.approx(wanted, rel=2e-3)
    for name, gradient in gradients.items():
        allowed = 1.2 * distance(plain_gradients[name], wanted_gradients[name])
        assert distance(gradient, wanted_gradients[name]) < allowed, name


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    dtype_of_sum = losses.dtype_of_sum
    monkeypatch.setattr(losses, "dtype_of_sum", lambda dtype, _: dtype_of_sum(dtype, torch.device("cuda")))


def test_sums_over_chunks_in_bf16(as_on_a_gpu):
    compare_in_bf16(torch.device("cpu"))


@pytest.mark.parametrize("different", [500, 1])
def test_sums_of_any_size_in_bf16(different, as_on_a_gpu):
    """Sums are in the range of fp16: columns may be large, small or zero, words improbable, and all targets the same."""
    torch.manual_seed(0)
    head, hidden, targets = (
        nn.Linear(16, 501, bias=False),
        torch.rand(1, 6144, 16),
        1 + torch.randint(different, (6144,)),
    )
    sizes = 10 ** torch.linspace(-15, 15, 16)
    head.weight.data[0] = -2.4  # a probability of 1e-9
    head.weight.data = (head.weight.data / sizes).bfloat16()
    hidden = (hidden * sizes).bfloat16()
    hidden[..., 3] = 0
    linear_cross_entropy(head, targets, hidden).backward()
    wanted = copy.deepcopy(head).float()
    wanted.zero_grad()
    losses.summed_cross_entropy(wanted(hidden.float())[0], targets).backward()
    right, error = wanted.weight.grad / sizes, (head.weight.grad - wanted.weight.grad) / sizes
    assert (error.norm(dim=0) <= 2**-8 * right.norm(dim=0)).all() and not head.weight.grad[:, 3].any()
    assert 0 < error[0].norm() < 0.05 * right[0].norm()


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("words", "width", "rows"), [(128256, 2048, 2048), (32000, 4096, 4096)])
def test_memory_beside_the_gradients(words, width, rows, precision):
    """It is less than two tensors in fp32, each as large as the hidden states or as the logits of 256 rows."""
    weight, hidden = (
        torch.empty(size, width, dtype=precision, device="meta", requires_grad=True) for size in (words, rows)
    )
    with Ledger("meta", words) as ledger:
        ledger.tag((weight, hidden), "parameters")
        ledger.begin_step()
        before = ledger.total
        targets = torch.zeros(rows, dtype=torch.int64, device="meta")
        losses.LinearCrossEntropy.apply(weight, hidden, None, targets, precision, True).backward()
    assert ledger.peak - before - weight.grad.nbytes - hidden.grad.nbytes < 2 * 4 * max(256 * words, rows * width)


def test_no_logits_are_made(monkeypatch):
    """Logits of all tokens never exist at once; afterwards the model gives logits again, even after an error."""
    model, batch = make_model(), make_batch()

    def tokens(tensor: torch.Tensor) -> int:
        return tensor.numel() // VOCABULARY if tensor.ndim > 1 and tensor.shape[-1] == VOCABULARY else 0

    with Watch(tokens) as watch:
        next_token_loss_without_logits(model, batch).backward()
    assert 0 < watch.largest <= 384, "tokens whose logits were there at once"
    with pytest.raises(IndexError):
        next_token_loss_without_logits(model, batch | {"input_ids": batch["input_ids"] + VOCABULARY})
    assert model(input_ids=batch["input_ids"]).logits.shape == (BATCH_SIZE, LENGTH, VOCABULARY)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_an_ignored_row_contributes_nothing(garbage, precision, as_on_a_gpu):
    """Whatever it holds: loss and gradients are those of the other rows alone, also that of a bias."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(16, 50).to(precision)
    hidden, targets = torch.randn(2, 300, 16, generator=generator), torch.randint(50, (600,), generator=generator)
    hidden = hidden.to(precision)
    ignored = torch.rand(600, generator=generator) < 0.5
    targets[ignored] = IGNORE_INDEX
    found, tolerance = [], 1e-5 if precision == torch.float32 else 2**-8
    for rows, words in ((hidden.flatten(0, 1)[~ignored][None], targets[~ignored]), (hidden, targets)):
        rows = rows.clone().requires_grad_()
        rows.data.flatten(0, 1)[words == IGNORE_INDEX] = garbage
        head.zero_grad()
        loss = linear_cross_entropy(head, words, rows)
        (3 * loss).backward()
        found.append((loss, head.weight.grad, head.bias.grad, rows.grad.flatten(0, 1)))
    assert not found[1][3][ignored].any() and found[1][3][~ignored].any()
    for wanted, other in zip(found[0], (*found[1][:3], found[1][3][~ignored]), strict=True):
        torch.testing.assert_close(other, wanted, rtol=tolerance, atol=tolerance)


def test_each_logit_is_computed_once(monkeypatch):
    """Three matmuls, and few bytes a logit, of which a few hundred rows exist at once beside one gradient of the weight."""
    monkeypatch.setattr(losses, "LOGITS_IN_FP32", 64 * 2000)
    head, hidden = nn.Linear(32, 2000, bias=False), torch.randn(2, 512, 32, requires_grad=True)
    with Ledger("cpu", 2000) as ledger:
        ledger.tag((head.weight, hidden), "parameters")
        ledger.begin_step()
        before = ledger.total
        linear_cross_entropy(head, torch.randint(2000, (1024,)), hidden).backward()
    assert sum(ledger.flops.values()) == 3 * 2 * hidden.numel() * 2000 and not ledger.recomputed
    assert 28 < sum(ledger.moved.values()) / (1024 * 2000) < 33
    assert ledger.at_peak["logits"] == 4 * 2000 * (384 + 64)
    assert ledger.peak - before < ledger.at_peak["logits"] + 4 * (head.weight.numel() + 2 * hidden.numel())


def test_a_result_that_is_written_in_place_moves_once():
    with FakeTensorMode(), Ledger("cpu", 0) as ledger:
        total, a, b = (torch.empty(size, dtype=torch.float16) for size in ((4, 6), (4, 5), (5, 6)))
        torch.addmm(total, a, b, out=total)
        total.addmm_(a, b)
        torch.empty(4, 6).scatter_(1, torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))
    assert dict(ledger.flops) == {f"{name} float16": 2 * 4 * 5 * 6 for name in ("addmm", "addmm_")}
    assert ledger.moved["addmm"] == ledger.moved["addmm_"] == 2 * (2 * 4 * 6 + 4 * 5 + 5 * 6)
    assert ledger.moved["scatter_"] == 4 * (8 + 4 + 2 * 4)


def test_no_gradient_that_nobody_wants():
    """None of a frozen output layer, and none at all without a backward pass; a second backward pass is an error."""
    model = make_model()
    with Watch() as evaluation, torch.no_grad():
        wanted = next_token_loss_without_logits(model, make_batch())
    assert not evaluation.names & {"aten::exp", "aten::addmm_"}
    loss_and_gradients(next_token_loss_without_logits, model)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.lm_head.requires_grad_(False)
    with Watch() as frozen:
        loss = next_token_loss_without_logits(model, make_batch())
        (loss / 123).backward(retain_graph=True)
    assert loss == wanted and "aten::exp" in frozen.names and "aten::addmm_" not in frozen.names
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight":
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, gradients[name])
    refuses("kept for one backward pass, and this is the second", (loss / 123).backward, error=RuntimeError)


@pytest.mark.parametrize("loss_fn", [next_token_loss, next_token_loss_without_logits])
def test_experts_are_balanced_as_transformers_does_it(loss_fn):
    """Experts are balanced only in training; the loss of an evaluation is that of the text alone."""
    balance = {"router_aux_loss_coef": 0.5, "initializer_range": 0.2}
    config = tiny_config("mixtral", vocab_size=VOCABULARY, intermediate_size=16, **balance)
    model, batch = initialize(new_model(config, "sdpa"), 0, "cpu"), make_batch()
    num_targets = losses.count_next_tokens(batch)
    for is_training in (True, False):
        model.train(is_training)
        wanted = model(**batch, output_router_logits=is_training).loss
        assert (loss_fn(model, batch) / num_targets).item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize(
    "changed, alone, said",
    [
        (Gemma2Config(), Gemma2Config(final_logit_softcapping=None), "the loss of a tiny gemma2 is .* % off"),
        (GraniteConfig(logits_scaling=8.0), GraniteConfig(), "the loss of a tiny granite is .* % off"),
        (InklingTextConfig(unpadded_vocab_size=200058), InklingTextConfig(), "a tiny inkling_text cannot be computed"),
        (DoryConfig(), ModernBertDecoderConfig(), "a tiny dory trains .* parameters, without lm_head.logit_scale"),
    ],
    ids=["a cap", "a factor", "rows that are no words", "a factor that is trained"],
)
def test_a_model_that_changes_its_logits_is_refused(changed, alone, said):
    """What a class computes before its output layer is in the loss; of what it computes behind it, only a trial tells."""
    refuses(rf"{said}.*give --whole_logits", next_token_loss_without_logits, new_model(changed, "auto"), make_batch())
    check_head(alone)


SCRIPT = CHILDREN / "losses.py"


@pytest.fixture(scope="module")
def run_child(run_result):
    """Run tests/children/losses.py."""

    def result(config: str, *flags: str) -> dict:
        return run_result("--per_device_train_batch_size", 4 if config == "single" else 2, config=config, flags=flags)

    return result


SHARDED = ("fsdp_full", "--fsdp_activation_checkpointing", "true")


@pytest.mark.parametrize("name", ["llama", "llama, tied", "mixtral"])
def test_sharded(run_child, name):
    """With FSDP2, loss, gradients, three steps and generated text are those of one process."""
    alone, found = run_child("single")["models"][name], run_child(*SHARDED)["models"][name]
    assert run_child(*SHARDED)["world_size"] == 2
    for result in (alone, found):
        plain, without_logits = result["losses"]
        assert without_logits == pytest.approx(plain, rel=1e-5)
        assert max(result["distance"].values()) < 1e-4, "of a gradient from the plain loss's"
    assert found["trajectory"] == pytest.approx(alone["trajectory"], rel=1e-5)
    assert alone["trajectory"][2] < alone["trajectory"][0] - 0.5, "it learns"
    assert found["texts"] == alone["texts"]


def test_prefetching(run_child):
    """Two layers are gathered ahead, in the order of their use, with the same losses bit for bit."""
    for name, found in run_child(*SHARDED)["models"].items():
        first = 1  # of the four layers; before them the embedding, and tied also the output layer
        layers = range(first, first + 4)
        ways = found["prefetched"]
        assert [ways["forward"][i] for i in layers] == [[2, 3], [3, 4], [4], []], name
        assert [ways["backward"][i] for i in layers] == [[], [1], [2, 1], [3, 2]], name
        assert not any(ways[way][i] for way in ways for i in range(len(ways[way])) if i not in layers)
        assert found["trajectory with prefetching"] == found["trajectory"]


@pytest.mark.slow
def test_sharded_in_bf16(run_child):
    for name, found in run_child("fsdp_full", "--mixed_precision", "bf16")["models"].items():
        plain, without_logits = found["losses"]
        assert without_logits == pytest.approx(plain, rel=1e-3), name
        wanted = run_child("single")["models"][name]["trajectory"]
        assert found["trajectory"] == pytest.approx(wanted, rel=2e-2)


@pytest.mark.long
def test_compiled(run_child):
    """Compiled layer by layer, as by the YAML's dynamo_config, the loss is the same."""
    flags = ("--dynamo_backend", "inductor", "--dynamo_use_regional_compilation")
    wanted = run_child("single")["models"]
    for name, found in run_child("fsdp_full", *flags)["models"].items():
        assert found["trajectory"] == pytest.approx(wanted[name]["trajectory"], rel=1e-5)
