"""Real models as pipelines, unmodified: outputs, gradients and buffers are those of the plain model."""

from __future__ import annotations

import copy
import functools
import importlib.util
import threading

import pytest
import torch

from pipesight import Pipeline
from pipesight.pipeline.placed_units import Placement
from zoo import CHUNKS, ZOO
from zoo.reference import Result, assert_same, buffers_of, gradients_of, objective, piped, plain_microbatches, worst

BY_NAME = {entry.name: entry for entry in ZOO}
PARAMETERS = [
    pytest.param(
        entry,
        id=entry.name,
        marks=pytest.mark.skipif(importlib.util.find_spec(entry.needs) is None, reason=f"{entry.needs} is missing"),
    )
    for entry in ZOO
]


@functools.cache
def truth(name):
    entry = BY_NAME[name]
    return plain_microbatches(entry, entry.build(), entry.batch())


@pytest.mark.parametrize(("partitions", "checkpoint"), [(2, "never"), (4, "always")])
@pytest.mark.parametrize("entry", PARAMETERS)
def test_same_as_the_plain_model(entry, partitions, checkpoint):
    model, expected = entry.build(), truth(entry.name)
    names = list(model.state_dict())
    pipe = Pipeline(model, entry.cuts_into(partitions), chunks=CHUNKS, checkpoint=checkpoint, **entry.options)
    assert_same(piped(pipe, entry.batch()), expected)
    pipe.zero_grad()
    again = piped(pipe, entry.batch())  # the engine now knows what each block uses, and looks less
    assert_same(Result(again.outputs, again.gradients, expected.buffers), expected)
    assert list(pipe.state_dict()) == names


def gpt2(**settings):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = BY_NAME["GPT-2"].build().config
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def test_dropout_is_that_of_the_seed_however_it_is_recomputed():
    """Masks depend on the seed and the micro-batch, not on checkpointing or on what ran before."""
    call, found = BY_NAME["GPT-2"].batch(), []
    for checkpoint, seed in [("never", 1), ("always", 1), ("except_last", 1), ("never", 2)]:
        model = gpt2(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
        pipe = Pipeline(model, ["transformer.h.1", "transformer.h.3"], chunks=CHUNKS, checkpoint=checkpoint)
        torch.manual_seed(seed)
        found.append(piped(pipe, call))
    for other in found[1:3]:
        assert_same(other, found[0])
    with pytest.raises(AssertionError, match="differ by"):
        assert_same(found[3], found[0])


def test_generate_is_the_plain_models():
    """Greedy search of a causal model, with its cache, through the pipeline's own forward and the model's method."""
    plain = gpt2().eval()
    pipe = Pipeline(copy.deepcopy(plain), ["transformer.h.2"], chunks=2)
    ids = torch.randint(3, 50, (4, 5), generator=torch.Generator().manual_seed(0))
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(pipe.generate(ids, **settings), plain.generate(ids, **settings))
    with torch.no_grad():
        first = pipe(ids)
        token = first.logits[:, -1:].argmax(-1)
        again = pipe(token, past_key_values=first.past_key_values)
        expected = plain(torch.cat([ids, token], 1)).logits[:, -1:]
    torch.testing.assert_close(again.logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("search", [{}, {"num_beams": 2}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_generate_on_several_devices(monkeypatch, search):
    """There, it goes through the pipeline, which moves tensors; here, the devices only look like several."""
    plain = gpt2().eval()
    pipe = Pipeline(copy.deepcopy(plain), ["transformer.h.2"], devices=["cpu", "cpu"], chunks=2)
    monkeypatch.setattr(Placement, "on_one_device", False)
    calls = []
    pipe.module.transformer.h[2].register_forward_hook(lambda *_: calls.append(threading.current_thread().name))
    ids = torch.randint(3, 50, (4, 5), generator=torch.Generator().manual_seed(0))
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for _ in range(2):
        assert torch.equal(pipe.generate(ids, **settings, **search), plain.generate(ids, **settings, **search))
    assert {name.startswith("pipesight-") for name in calls} == {True}
    assert pipe.chunks == 2
    assert "forward" not in vars(pipe.module)


def test_all_outputs_of_uneven_micro_batches():
    """Hidden states and attentions come back whole, and gradients of all of them arrive."""
    entry = BY_NAME["GPT-2"]
    _, call = entry.batch()
    call = {key: value[:5] for key, value in call.items()} | {"output_hidden_states": True}
    plain = gpt2()
    pipe = Pipeline(copy.deepcopy(plain), entry.cuts_into(4), chunks=2)
    for model in (plain, pipe):
        output = model(**call)
        (output.loss + sum(state.square().mean() for state in output.hidden_states)).backward()
    error, name = worst(gradients_of(pipe), gradients_of(plain), 1e-4)
    assert error <= 1e-4, name  # the whole batch, not micro-batches


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of what peft asks of transformers
def test_lora():
    """Adapters of peft get the gradients of the plain model, and nothing else gets any."""
    peft = pytest.importorskip("peft", reason="needs peft")
    entry = BY_NAME["Llama"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(entry.build(), config)
    expected = plain_microbatches(entry, model, entry.batch())
    cuts = [f"base_model.model.{cut}" for cut in entry.cuts]
    pipe = Pipeline(model, cuts, chunks=CHUNKS)
    assert_same(piped(pipe, entry.batch()), expected)
    learned = {name for name, gradient in expected.gradients.items() if gradient is not None}
    assert learned == {name for name in expected.gradients if "lora_" in name}


def test_the_comparison_can_fail():
    """A gradient that is off by little more than is allowed is found, by name."""
    entry = BY_NAME["nn.Transformer"]
    right, wrong = (plain_microbatches(entry, entry.build(), entry.batch()) for _ in range(2))
    wrong.gradients["decoder.layers.1.linear2.weight"] *= 1 + 2e-5
    with pytest.raises(AssertionError, match=r"gradients differ by .* most in decoder\.layers\.1\.linear2\.weight"):
        assert_same(wrong, right)


@pytest.mark.parametrize("entry", PARAMETERS)
def test_steps_have_the_gradients_of_the_plain_model(entry):
    """Where a model returns no loss, a sum over its outputs is one."""
    options = {"loss_weight": None if entry.items else "sum", **entry.options}
    pipe = Pipeline(
        entry.build(),
        entry.cuts_into(4),
        chunks=CHUNKS,
        schedule="zero-bubble",
        checkpoint="except_last",
        loss=objective,
        **options,
    )
    pipe.step(*(call := entry.batch())[0], **call[1])
    expected = truth(entry.name)
    assert_same(Result(expected.outputs, gradients_of(pipe), buffers_of(pipe)), expected)
