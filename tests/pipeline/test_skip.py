"""Skip connections carry tensors and gradients past layers and partitions as if nothing lay between."""

from __future__ import annotations

import copy
import io
import pickle
import re
import traceback
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipesight import GPipe
from pipesight.skip import Namespace, pop, skippable, stash, verify_skippables
from support.against_plain import Fn, assert_same, assert_same_state, error_of, modes, rand, total


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes what it makes of its input; the rest of the model gets something else."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(rand(3))

    def forward(self, x):
        yield stash("skip", x * self.weight)
        return x.sin()


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Multiplies its input by the skip."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(rand(3))

    def forward(self, x):
        skip = yield pop("skip")
        return x * skip + self.weight


def middle():
    return Fn(lambda s, x: (x * s.a).cos())


def skipping(stashes=(), pops=(), *, make=None, use=None):
    """Return a layer that stashes and pops some names; ``make(s, x, name)`` gives the tensor to stash."""
    make = make or (lambda s, x, name: x * s.a * (1 + len(name)))
    use = use or (lambda s, x, skip, name: x * skip + s.b)

    @skippable(stash=stashes, pop=pops)
    class Skipping(Fn):
        def __init__(self):
            super().__init__(None)

        def forward(self, x):
            for name in sorted(pops):
                skip = yield pop(name)
                x = use(self, x, skip, name)
            for name in sorted(stashes):
                yield stash(name, make(self, x, name))
            return x.sin() * self.a

    return Skipping()


# The same as in the plain model.


@modes
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("balance", [[4], [1, 3], [2, 2], [3, 1], [1, 2, 1], [1, 1, 1, 1]])
def test_one_skip(balance, grad, checkpoint):
    """A skip gives the plain model's outputs and gradients, within a partition, to the next, or past several."""
    model = nn.Sequential(Stash(), middle(), middle(), Pop())
    assert_same(model, rand(5, 3, grad=grad), balance, chunks=2, checkpoint=checkpoint)


@modes
@pytest.mark.parametrize("balance", [[6], [1, 5], [3, 3], [2, 2, 2], [1, 1, 1, 1, 1, 1]])
def test_crossing_skips(balance, checkpoint):
    """Skips may cross each other, and several may leave or reach one layer."""
    model = nn.Sequential(
        skipping(["a", "b"]),
        skipping(["c"], ["b"]),
        middle(),
        skipping(["d"], ["a"]),
        skipping([], ["d"]),
        skipping([], ["c"]),
    )
    assert_same(model, rand(5, 3, grad=True), balance, chunks=2, checkpoint=checkpoint)


@modes
def test_nested_skips(checkpoint):
    """Skips may lie within each other, as in a U-Net."""
    names = "abc"
    down, up = [skipping([n]) for n in names], [skipping([], [n]) for n in reversed(names)]
    assert_same(
        nn.Sequential(*down, middle(), *up), rand(7, 3, grad=True), [2, 1, 1, 3], chunks=3, checkpoint=checkpoint
    )


@modes
@pytest.mark.parametrize("balance", [[3], [1, 2], [1, 1, 1]])
def test_skippable_inside_a_layer(balance, checkpoint):
    """A skippable module may be anywhere inside a layer."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(3, 3), nn.Sequential(Stash(), nn.Tanh())).double(),
        nn.Sequential(middle(), skipping(["x"]), skipping([], ["x"])),
        nn.Sequential(nn.Sequential(nn.Identity(), Pop()), nn.Linear(3, 3)).double(),
    )
    assert_same(model, rand(5, 3, grad=True), balance, chunks=2, checkpoint=checkpoint)


@modes
@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 1, 1, 1]])
def test_isolated_pairs(balance, checkpoint):
    """The same classes may be used again under a namespace of their own."""
    one, other = Namespace(), Namespace()
    model = nn.Sequential(Stash().isolate(one), Stash().isolate(other), Pop().isolate(one), Pop().isolate(other))
    assert_same(model, rand(5, 3, grad=True), balance, chunks=2, checkpoint=checkpoint)
    assert_same(
        nn.Sequential(Stash(), Stash().isolate(one), Pop(), Pop().isolate(one)),
        rand(5, 3, grad=True),
        balance,
        chunks=2,
        checkpoint=checkpoint,
    )


@modes
def test_one_class_declared_twice(checkpoint):
    """A class declared once more gives another class for the other names, also one derived from it; the first stays."""

    class Carry(Fn):
        def forward(self, x):
            for name in self.stashable_names:
                yield stash(name, x * self.a)
            for name in self.poppable_names:
                x = x + (yield pop(name)) * self.b
            return x.sin()

    class Derived(Carry):
        pass

    first, second, third = skippable(["a"])(Carry), skippable(["b"], ["a"])(Carry), skippable(pop=["b"])(Derived)
    assert (first is Carry, second.__name__, third is Derived) == (True, "Carry", True)
    model = nn.Sequential(first(None), second(None), third(None))
    assert_same(model, rand(5, 3, grad=True), [1, 1, 1], chunks=2, checkpoint=checkpoint)
    assert [layer.stashable_names | layer.poppable_names for layer in model] == [{"a"}, {"a", "b"}, {"b"}]


@modes
def test_isolate_only_some_names(checkpoint):
    """isolate(only=...) moves those names and leaves the others."""
    space = Namespace()
    model = nn.Sequential(
        skipping(["a", "b"]).isolate(space, only=["b"]),
        skipping(["b"]),
        skipping([], ["a", "b"]).isolate(space, only=["b"]),
        skipping([], ["b"]),
    )
    assert_same(model, rand(5, 3, grad=True), [1, 1, 1, 1], chunks=2, checkpoint=checkpoint)


def test_isolate_twice():
    """The namespace given last counts, for the names it was given for."""
    one, other = Namespace(), Namespace()
    layer = skipping(["a", "b"]).isolate(one).isolate(other, only=["b"])
    verify_skippables(nn.Sequential(layer, skipping([], ["a"]).isolate(one), skipping([], ["b"]).isolate(other)))


def test_isolate_returns_the_layer_and_knows_its_names():
    """The method isolate returns the layer itself; a name it does not declare is an error."""
    layer = Stash()
    assert layer.isolate(Namespace()) is layer
    with pytest.raises(ValueError, match="Stash declares no such names: other, skips"):
        layer.isolate(Namespace(), only=["skips", "skip", "other"])
    with pytest.raises(TypeError, match=r"only=\['skip'\]"):
        layer.isolate(Namespace(), only="skip")


def test_namespaces_are_told_apart():
    """Two namespaces are different; one is equal to itself after a copy or a pickle."""
    one, other = Namespace(), Namespace()
    assert one != other
    assert one == copy.deepcopy(one) == pickle.loads(pickle.dumps(one))
    assert len({one, other, copy.deepcopy(one)}) == 2


@modes
def test_none(checkpoint):
    """None may be stashed, for all micro-batches or some."""
    model = nn.Sequential(
        skipping(["a"], make=lambda s, x, _: None if x[0, 0] > 0 else x * s.a),
        middle(),
        skipping([], ["a"], use=lambda s, x, skip, _: x * s.b if skip is None else x * skip),
    )
    x = rand(6, 3)
    x[:, 0] = torch.tensor([1, -1, 1, 1, -1, -1])
    for rows in (x, x[x[:, 0] > 0]):
        assert_same(copy.deepcopy(model), rows.requires_grad_(), [1, 1, 1], chunks=6, checkpoint=checkpoint)


@modes
@pytest.mark.parametrize(
    "make",
    [
        lambda s, x, _: (x * s.a).detach(),
        lambda s, x, _: (x > 0).double(),
        lambda s, x, _: (x * 10).long(),
        lambda s, x, _: x > 0,
        lambda s, x, _: torch.ones(1, dtype=torch.float64),
        lambda s, x, _: torch.tensor(3),
    ],
    ids=["detached", "new", "integer", "boolean", "not of the batch", "0-d"],
)
def test_skip_without_gradient(make, checkpoint):
    """A skip that wants no gradient, detached, integer, boolean or made anew, arrives as it is."""
    model = nn.Sequential(skipping(["a"], make=make), middle(), skipping([], ["a"]))
    assert_same(model, rand(5, 3, grad=True), [1, 1, 1], chunks=2, checkpoint=checkpoint)


@modes
@pytest.mark.parametrize("balance", [[1, 1, 1], [2, 1], [1, 2]])
def test_only_the_skip_carries_a_gradient(balance, checkpoint):
    """If the layers between cut the graph, the gradient still comes back through the skip."""
    model = nn.Sequential(Stash(), Fn(lambda s, x: (x * s.a).detach()), Pop())
    pipe, _ = assert_same(model, rand(5, 3, grad=True), balance, chunks=2, checkpoint=checkpoint)
    assert pipe[0].weight.grad is not None
    model = nn.Sequential(Stash(), Fn(lambda s, x: torch.zeros_like(x) + s.a), Pop())
    assert_same(model, rand(5, 3, grad=True), balance, chunks=2, checkpoint=checkpoint)


@modes
def test_skip_that_is_not_used(checkpoint):
    """A skip that the layer pops and ignores takes no gradient."""
    model = nn.Sequential(Stash(), middle(), skipping([], ["skip"], use=lambda s, x, *_: x * s.b))
    pipe, _ = assert_same(model, rand(5, 3, grad=True), [1, 1, 1], chunks=2, checkpoint=checkpoint)
    assert pipe[0].weight.grad is None


@modes
@pytest.mark.parametrize("balance", [[1, 1, 1], [2, 1], [1, 2]])
def test_the_input_itself_is_stashed(balance, checkpoint):
    """The very input, of a layer or of the model, may be stashed, and go on as the output too."""

    @skippable(stash=["skip"])
    class Keep(nn.Module):
        def forward(self, x):
            yield stash("skip", x)
            return x

    model = nn.Sequential(Keep(), middle(), Pop())
    assert_same(model, rand(5, 3, grad=True), balance, chunks=2, checkpoint=checkpoint)


@modes
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_frozen_layers(frozen, checkpoint):
    """Whatever is frozen, the skip carries the gradients of the rest."""
    for grad in (False, True):
        model = nn.Sequential(Stash(), middle(), Pop())
        for k in frozen:
            model[k].requires_grad_(False)
        assert_same(model, rand(5, 3, grad=grad), [1, 1, 1], chunks=2, checkpoint=checkpoint)


@modes
def test_skip_changed_in_place(checkpoint):
    """A layer that says it works in place may change the skip it popped."""
    layer = skipping([], ["skip"], use=lambda s, x, skip, _: skip.mul_(2) * x * s.b)
    layer.inplace = True
    model = nn.Sequential(Stash(), middle(), layer)
    assert_same(model, rand(5, 3, grad=True), [1, 1, 1], chunks=2, checkpoint=checkpoint)


@modes
def test_skip_changed_in_place_without_saying_so(checkpoint):
    """A layer that changes the skip and does not say so: right gradients, or an error that names the way out."""
    layer = skipping([], ["skip"], use=lambda s, x, skip, _: skip.mul_(2) * x * s.b)
    model = nn.Sequential(Stash(), middle(), layer)
    plain = copy.deepcopy(model)
    pipe = GPipe(model, [1, 1, 1], chunks=1, checkpoint=checkpoint)
    total(plain(rand(4, 3))).backward()
    error = error_of(lambda: total(pipe(rand(4, 3))).backward())
    if error is not None:
        assert checkpoint == "always"
        assert "inplace = True" in str(error)
    else:
        assert_same_state(pipe, plain)


@modes
def test_skip_changed_in_place_while_others_need_it(checkpoint):
    """If what the change overwrites is still needed: an error, as in the plain model, or the right gradient."""

    @skippable(stash=["skip"])
    class Keep(nn.Module):
        def forward(self, x):
            yield stash("skip", x)
            return x

    layer = skipping([], ["skip"], use=lambda s, x, skip, _: skip.mul_(2) * x * s.b)
    layer.inplace = True
    model = nn.Sequential(Fn(lambda s, x: x * s.a), Keep(), Fn(lambda s, x: x * x * s.a), layer)
    plain = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total(plain(rand(4, 3))).backward()
    fixed = nn.Sequential(
        *copy.deepcopy(plain[:3]), skipping([], ["skip"], use=lambda s, x, skip, _: skip * 2 * x * s.b)
    )
    fixed.zero_grad()
    total(fixed(rand(4, 3))).backward()
    pipe = GPipe(model, [1, 1, 1, 1], chunks=2, checkpoint=checkpoint)
    error = error_of(lambda: total(pipe(rand(4, 3))).backward())
    if error is not None:
        assert "inplace" in str(error) or "in place" in str(error)
    else:
        torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in fixed.parameters()])


@modes
def test_retained_graph(checkpoint):
    """Backward can run again through a skip."""
    plain = nn.Sequential(Stash(), middle(), Pop())
    pipe = GPipe(copy.deepcopy(plain), [1, 1, 1], chunks=2, checkpoint=checkpoint)
    loss, expected = total(pipe(rand(4, 3))), total(plain(rand(4, 3)))
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)
        expected.backward(retain_graph=retain)
        assert_same_state(pipe, plain)


@modes
def test_several_passes_under_way(checkpoint):
    """Skips of different mini-batches are not mixed up."""
    plain = nn.Sequential(Stash(), middle(), Pop())
    pipe = GPipe(copy.deepcopy(plain), [1, 1, 1], chunks=2, checkpoint=checkpoint)
    losses, expected = ([total(m(rand(4, 3) + k)) for k in range(3)] for m in (pipe, plain))
    for k in (1, 2, 0):
        losses[k].backward()
        expected[k].backward()
        assert_same_state(pipe, plain)


@pytest.mark.parametrize("balance", [[3], [1, 1, 1]])
def test_without_grad(balance):
    """Skips work in eval, under no_grad and inference_mode."""
    plain = nn.Sequential(Stash(), middle(), Pop())
    pipe = GPipe(copy.deepcopy(plain), balance, chunks=2)
    expected = plain(rand(4, 3)).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(pipe(rand(4, 3)), expected)
    torch.testing.assert_close(pipe.eval()(rand(4, 3)).detach(), expected)


@modes
def test_tuples_beside_skips(checkpoint):
    """A skip may pass layers that exchange tuples."""

    @skippable(stash=["skip"])
    class Split(nn.Module):
        def forward(self, x):
            yield stash("skip", x * 2)
            return x, x.sin(), x > 0

    @skippable(pop=["skip"])
    class Join(nn.Module):
        def forward(self, x):
            skip = yield pop("skip")
            return (x[0] * skip, x[1])

    model = nn.Sequential(Split(), Fn(lambda s, x: (x[0] * s.a, x[1] * s.b)), Join())
    assert_same(model, rand(5, 3, grad=True), [1, 1, 1], chunks=2, checkpoint=checkpoint)


@pytest.mark.slow
@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.data())
def test_random_skips(data):
    """Whatever skips there are over whatever partitions: the same as the plain model."""
    n = data.draw(st.integers(2, 7), "layers")
    ends = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda p: p[0] < p[1])
    pairs = data.draw(st.lists(ends, max_size=6), "skips")
    cuts = data.draw(st.sets(st.integers(1, n - 1)), "cuts")
    bounds = [0, *sorted(cuts), n]
    kinds = [data.draw(st.sampled_from(["plain", "none", "detached", "integer"]), "kind") for _ in pairs]

    def make(s, x, name):
        kind = kinds[int(name)]
        if kind == "none":
            return None
        return (x * 9).long() if kind == "integer" else (x * s.a).detach() if kind == "detached" else x * s.a

    def use(s, x, skip, name):
        return x * s.b if skip is None else x + skip * s.b

    layers = []
    for k in range(n):
        stashes = [str(p) for p, (a, _) in enumerate(pairs) if a == k]
        pops = [str(p) for p, (_, b) in enumerate(pairs) if b == k]
        layers.append(skipping(stashes, pops, make=make, use=use) if stashes or pops else middle())
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        parameter.requires_grad_(data.draw(st.integers(0, 3), "trained") > 0)
    assert_same(
        model,
        rand(data.draw(st.integers(0, 5), "rows"), 3, grad=data.draw(st.booleans(), "grad")),
        [b - a for a, b in pairwise(bounds)],
        chunks=data.draw(st.integers(1, 4), "chunks"),
        checkpoint=data.draw(st.sampled_from(["always", "except_last", "never"]), "checkpoint"),
    )


# A decorated class is still the class.


def test_plain_use():
    """In a plain nn.Sequential skips work too, call after call."""
    model = nn.Sequential(Stash(), Pop())
    x = rand(4, 3)
    for _ in range(2):
        torch.testing.assert_close(model(x), x.sin() * (x * model[0].weight) + model[1].weight)


def test_class_stays_itself():
    """Name, docstring, isinstance and the state's keys are those of the undecorated class."""
    assert Stash.__name__ == "Stash"
    assert Stash.__doc__.startswith("Stashes what it makes")
    layer = Stash()
    assert type(layer) is Stash
    assert list(layer.state_dict()) == ["weight"]
    assert list(nn.Sequential(Stash().isolate(Namespace()), Pop()).state_dict()) == ["0.weight", "1.weight"]
    assert list(GPipe(nn.Sequential(Stash(), Pop()), [1, 1]).plain_state_dict()) == ["0.weight", "1.weight"]


@modes
def test_old_style_super(checkpoint):
    """super(Cls, self).__init__() in a decorated class works."""

    @skippable(stash=["skip"])
    class Old(nn.Linear):
        def __init__(self):
            super(Old, self).__init__(3, 3)  # noqa: UP008 (it is what is tested)

        def forward(self, x):
            yield stash("skip", x)
            return super(Old, self).forward(x)  # noqa: UP008

    assert_same(
        nn.Sequential(Old(), middle(), Pop()).double(),
        rand(5, 3, grad=True),
        [1, 1, 1],
        chunks=2,
        checkpoint=checkpoint,
    )


@modes
def test_deep_copies(checkpoint):
    """A deep copy of a model with skips and namespaces works and is independent."""
    one, other = Namespace(), Namespace()
    model = nn.Sequential(Stash().isolate(one), Stash().isolate(other), Pop().isolate(one), Pop().isolate(other))
    pipe = GPipe(model, [1, 1, 1, 1], chunks=2, checkpoint=checkpoint)
    pipe(rand(4, 3)).sum().backward()
    twin = copy.deepcopy(pipe)
    twin.zero_grad()
    pipe.zero_grad()
    twin(rand(4, 3)).sum().backward()
    assert all(p.grad is None for p in pipe.parameters())
    torch.testing.assert_close(twin(rand(4, 3)), pipe(rand(4, 3)))


@modes
@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_pickles(way, checkpoint):
    """A model with skips and namespaces can be pickled, plain and as a pipeline, before and after a pass."""
    space = Namespace()
    model = nn.Sequential(Stash().isolate(space), Stash(), Pop(), Pop().isolate(space))
    pipe = GPipe(copy.deepcopy(model), [1, 1, 1, 1], chunks=2, checkpoint=checkpoint)

    def reload(what):
        if way == "pickle":
            return pickle.loads(pickle.dumps(what))
        file = io.BytesIO()
        torch.save(what, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    expected = model(rand(4, 3))
    for _ in range(2):
        for each in (reload(model), reload(pipe)):
            output = each(rand(4, 3))
            torch.testing.assert_close(output, expected)
            output.sum().backward()
        pipe(rand(4, 3)).sum().backward()


def test_forward_without_yield():
    """A class that declares nothing to do may have an ordinary forward."""

    @skippable()
    class Nothing(nn.Module):
        def forward(self, x):
            return x * 2

    assert torch.equal(nn.Sequential(Nothing())(rand(2, 3)), rand(2, 3) * 2)


def test_layer_with_hooks():
    """Forward hooks on a skippable layer see its output, not a generator."""
    seen = []
    model = nn.Sequential(Stash(), Pop())
    model[0].register_forward_hook(lambda _, x, y: seen.append(y))
    model(rand(4, 3))
    assert torch.equal(seen[0], rand(4, 3).sin())


# What is refused.


def test_every_wrong_pair_is_named_at_once():
    """verify_skippables lists all mistakes, with layers and names; GPipe refuses the model with the same words."""
    model = nn.Sequential()
    model.add_module("early", skipping([], ["early"]))
    model.add_module("first", skipping(["early", "twice", "forgotten"]))
    model.add_module("second", skipping(["twice"], ["unknown"]))
    model.add_module("third", skipping([], ["twice"]))
    model.add_module("fourth", skipping([], ["twice"]))
    for check in (verify_skippables, lambda m: GPipe(m, [5])):
        with pytest.raises(TypeError) as caught:
            check(model)
        message = str(caught.value)
        for line in (
            r"layer 'early' declared 'early' as poppable but it was not stashed by an earlier layer",
            r"layer 'second' redeclared 'twice' as stashable but not isolated by namespace, after layer 'first'",
            r"layer 'second' declared 'unknown' as poppable but it was not stashed",
            r"layer 'fourth' redeclared 'twice' as poppable but not isolated by namespace, after layer 'third'",
            r"no module declared 'forgotten' as poppable but stashed by layer 'first'",
        ):
            assert re.search(line, message), message
        assert "isolate(Namespace())" in message


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(),
        nn.Sequential(nn.Linear(1, 1)),
        nn.Sequential(Stash(), Pop()),
        nn.Sequential(nn.Sequential(Stash(), Pop())),
    ],
)
def test_right_models_pass(model):
    """verify_skippables is silent about a model in which all is well."""
    verify_skippables(model)


def test_pair_of_different_namespaces():
    """A stash and a pop of one name in different namespaces do not meet."""
    with pytest.raises(TypeError, match=r"no module declared .* as poppable but stashed by layer"):
        verify_skippables(nn.Sequential(Stash().isolate(Namespace()), Pop()))


def layer(forward, **names):
    """Return a skippable layer with the given forward."""
    return skippable(**names)(type("Wrong", (nn.Module,), {"forward": forward}))()


def undeclared_stash(self, x):
    yield stash("other", x)  # the user's line
    return x


def undeclared_pop(self, x):
    yield pop("other")  # the user's line
    return x


def double_stash(self, x):
    yield stash("skip", x)
    yield stash("skip", x * 2)  # the user's line
    return x


def double_pop(self, x):
    yield pop("skip")
    yield pop("skip")  # the user's line
    return x


def wrong_command(self, x):
    yield x  # the user's line
    return x


def wrong_tensor(self, x):
    yield stash("skip", [x])  # the user's line
    return x


@pytest.mark.parametrize("piped", [False, True])
@pytest.mark.parametrize(
    ("forward", "names", "kind", "message"),
    [
        (
            undeclared_stash,
            {},
            RuntimeError,
            r"'other' has not been declared as stashable: @skippable\(stash=\['other'\]\)",
        ),
        (undeclared_pop, {}, RuntimeError, r"'other' has not been declared as poppable: @skippable\(pop=\['other'\]\)"),
        (double_stash, {"stash": ["skip"]}, RuntimeError, "'skip' is used twice"),
        (double_pop, {"pop": ["skip"]}, RuntimeError, "'skip' is used twice"),
        (
            wrong_command,
            {},
            TypeError,
            r"is not a command from @skippable: forward must yield stash\(...\) or pop\(...\)",
        ),
        (wrong_tensor, {"stash": ["skip"]}, TypeError, "only a Tensor or None can be stashed, but 'skip' is list"),
    ],
)
def test_wrong_command_shows_the_users_line(forward, names, kind, message, piped):
    """What a layer does wrong raises at its own yield, in a plain model and in a pipeline."""
    wrong = layer(forward, **names)
    model = nn.Sequential(*([Stash(), wrong] if "pop" in names else [wrong, Pop()] if names else [wrong]))
    if piped:
        model = GPipe(model, [1] * len(model), chunks=2)
    with pytest.raises(kind, match=message) as caught:
        model(rand(4, 3))
    assert any("the user's line" in frame.line for frame in traceback.extract_tb(caught.tb))


def test_layer_that_catches_the_error():
    """A layer that catches the error at its yield goes on, or the error is raised: it never turns into another."""

    def forward(self, x):
        try:
            yield pop("skip")
        except RuntimeError:
            x = x * 2
        return x

    outputs = []
    model = nn.Sequential(layer(forward, pop=["skip"]))
    error = error_of(lambda: outputs.append(model(rand(4, 3))))
    if error is not None:
        assert "'skip' has not been stashed by an earlier layer" in str(error)
    else:
        assert torch.equal(outputs[0], rand(4, 3) * 2)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"stash": ["b", "a"]},
            r"'a', 'b' must be stashed but have not been, by Wrong; did you forget `yield`\? yield stash\('a',",
        ),
        (
            {"pop": ["a"]},
            r"'a' must be popped but have not been, by Wrong; did you forget `yield`\? tensor = yield pop\('a'\)",
        ),
    ],
)
def test_declared_but_not_done(names, message):
    """A layer that declares a name and does not use it raises when it has run."""

    def forward(self, x):
        return x
        yield

    def ordinary(self, x):
        return x

    for body in (forward, ordinary):
        with pytest.raises(RuntimeError, match=message):
            nn.Sequential(layer(body, **names))(rand(4, 3))


def test_pop_before_stash_inside_a_layer():
    """A pop that runs before its stash, inside one layer, raises."""
    inside = nn.Sequential(Pop(), Stash())
    with pytest.raises(RuntimeError, match="'skip' has not been stashed by an earlier layer"):
        GPipe(nn.Sequential(inside), [1])(rand(4, 3))


def test_errors_of_the_layer_pass_through():
    """An exception in a generator forward reaches the caller as itself."""

    def forward(self, x):
        yield stash("skip", x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        GPipe(nn.Sequential(layer(forward, stash=["skip"]), Pop()), [1, 1])(rand(4, 3))


@pytest.mark.parametrize("what", ["stash", "pop"])
def test_string_instead_of_list(what):
    """A string is not a list of names; the error shows the list."""
    with pytest.raises(TypeError, match=rf"{what}=\['skip'\]"):
        skippable(**{what: "skip"})


def test_decorator_without_parentheses():
    """A decorator without names is a TypeError that shows them."""
    with pytest.raises(
        TypeError, match=r"needs the names that Forgot stashes and pops: @skippable\(stash=\[...\], pop=\[...\]\)"
    ):

        @skippable
        class Forgot(nn.Module):
            pass


class Undecorated(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return x


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Sequential(Undecorated(), Pop()), "0"),
        (nn.Sequential(Undecorated()), "0"),
        (nn.Sequential(nn.Sequential(nn.Tanh(), Undecorated())), "0.1"),
    ],
)
def test_forgotten_decorator(model, name):
    """A layer that yields, of a class without the decorator, is named before anything runs."""
    for check in (verify_skippables, lambda m: GPipe(m, [1] * len(m))):
        with pytest.raises(TypeError, match=rf"layer '{name}' \(Undecorated\) yields.*did you forget @skippable\("):
            check(model)


def test_generator_inside_of_a_layer():
    """A module that yields to the layer it is part of is that layer's business."""

    class Halves(nn.Module):
        def forward(self, x):
            yield from x.chunk(2, dim=1)

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.halves = Halves()

        def forward(self, x):
            return sum(self.halves(x))

    assert GPipe(nn.Sequential(Sum()), [1])(rand(2, 4)).shape == (2, 2)


def test_stash_and_pop_of_one_name():
    """A layer cannot stash and pop the same name."""
    with pytest.raises(ValueError, match=r"stash and pop the same name.*a, b"):
        skippable(stash=["b", "a", "c"], pop=["a", "b"])


@pytest.mark.parametrize("thing", [nn.Linear(1, 1), int, lambda x: x])
def test_decorates_module_classes_only(thing):
    """What is no nn.Module class cannot be decorated."""
    with pytest.raises(TypeError, match=r"decorates an nn.Module class"):
        skippable(stash=["skip"])(thing)


def test_failure_leaves_nothing_behind():
    """After a failed pass the model works, and sees no tensor of the failed one."""
    plain = nn.Sequential(Stash(), middle(), Pop())
    pipe = GPipe(copy.deepcopy(plain), [1, 1, 1], chunks=2)
    tripping = pipe[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipe(rand(4, 3) + 100)
    tripping.remove()
    torch.testing.assert_close(pipe(rand(4, 3)), plain(rand(4, 3)))
