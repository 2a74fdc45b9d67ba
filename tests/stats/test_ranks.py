"""Statistics merged over ranks: real processes, compared with the statistics of all their tensors together."""

import itertools
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from support import warm
from support.logged import RANK, assert_six, lines, run_ranks, six, values

LOG = 'debug_api.log_tensor_stats("fc1", tensor={0}, tensor_name="activation"{1})\n'


def test_uneven_shards(tmp_path):
    """Every rank logs the statistics of all elements, however many each has; an empty shard counts nothing."""
    run_ranks(
        3,
        """
        debug_api.initialize(config(), log_dir=folder)
        for i in range(3):
            x = torch.arange(10.0).sin() + i
            debug_api.log_tensor_stats("fc1", tensor=[x[:7], x[7:], x[:0]][rank], tensor_name="activation")
            debug_api.step()
        debug_api.end_debug()
        """,
        tmp_path,
    )
    for rank in range(3):
        found = values(tmp_path, rank)
        for i in range(3):
            assert_six(found, i, "fc1", "activation", torch.arange(10.0).sin() + i)


ENDS_AFTER_AN_EXCHANGE = """
import sys, torch, torch.distributed as dist
from pipesight._padded_gather import PaddedGather
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
gather = PaddedGather(dist.group.WORLD)
sys.setswitchinterval(1000)  # other threads run when this one waits, and at no other time
for _ in range(3):
    assert gather(torch.ones(2), 2).tolist() == [[1, 1]] * 2
"""


def test_end_of_python_after_an_exchange(tmp_path):
    """The thread of gloo's that made an exchange frees its tensors before Python ends, which else aborts."""
    command = [sys.executable, "-c", ENDS_AFTER_AN_EXCHANGE, str(tmp_path / "store")]  # a fork would end too fast
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    ends = [(rank.communicate(timeout=100)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [0, 0], ends


def test_pooled_variance(tmp_path):
    """Shifted shards: the standard deviation is that of both together."""
    run_ranks(
        2,
        """
        debug_api.initialize(config(stats=["std", "mean"]), log_dir=folder)
        torch.manual_seed(rank)
        for i, shift in enumerate([1.0, 5.0, 1e6]):
            x = torch.randn(5000, dtype=torch.float64) + shift * rank
            torch.save(x, f"{folder}/{i}-{rank}.pt")
            debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation")
            debug_api.step()
        debug_api.end_debug()
        """,
        tmp_path,
    )
    for i in range(3):
        together = np.concatenate([torch.load(tmp_path / f"{i}-{rank}.pt").numpy() for rank in range(2)])
        for rank in range(2):
            found = values(tmp_path, rank)
            assert found[i, "fc1", "activation", "std"] == pytest.approx(together.std(ddof=1), rel=1e-12)
            assert found[i, "fc1", "activation", "mean"] == pytest.approx(together.mean(), rel=1e-12)


def test_layers_on_some_ranks_only(tmp_path):
    """A layer that ran on some ranks is merged over those, in the steps in which it ran."""
    run_ranks(
        3,
        """
        debug_api.initialize(config(stats=["numel"]), log_dir=folder)
        for i in range(4):
            if rank == 0 and i == 1:
                debug_api.log_tensor_stats("only", tensor=torch.ones(3), tensor_name="activation")
            if rank < 2 and i == 2:
                debug_api.log_tensor_stats("two", tensor=torch.ones(2), tensor_name="activation")
            if rank != 1:
                debug_api.log_tensor_stats(f"changes{i}", tensor=torch.ones(1), tensor_name="activation")
            debug_api.step()
        debug_api.end_debug()
        """,
        tmp_path,
    )
    found = [{(i, layer): value for (i, layer, *_), value in values(tmp_path, rank).items()} for rank in range(3)]
    others = {(i, f"changes{i}"): 2 for i in range(4)}
    assert found[0] == {(1, "only"): 3, (2, "two"): 4, **others}
    assert found[1] == {(2, "two"): 4}
    assert found[2] == others


def test_skip_reduction(tmp_path):
    """With skip_reduction a rank logs its own values; if all calls skip, none waits for another, and all end."""
    run_ranks(
        2,
        """
        debug_api.initialize(config(stats=["numel"]), log_dir=folder)
        for i in range(3 if rank else 5):  # not the same number of steps
            x = torch.ones(2 + rank)
            debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation", skip_reduction=True)
            debug_api.step()
        debug_api.end_debug()
        """,
        tmp_path,
    )
    assert list(values(tmp_path, 0).values()) == [2] * 5
    assert list(values(tmp_path, 1).values()) == [3] * 3


def test_some_calls_skip(tmp_path):
    """Merged and unmerged calls go side by side."""
    run_ranks(
        2,
        """
        debug_api.initialize(config(stats=["numel"]), log_dir=folder)
        for i in range(2):
            debug_api.log_tensor_stats("a", tensor=torch.ones(2 + rank), tensor_name="activation", skip_reduction=True)
            debug_api.log_tensor_stats("b", tensor=torch.ones(2 + rank), tensor_name="activation")
            debug_api.step()
        debug_api.end_debug()
        """,
        tmp_path,
    )
    for rank in range(2):
        assert [v for (_, layer, *_), v in values(tmp_path, rank).items() if layer == "a"] == [2 + rank] * 2
        assert [v for (_, layer, *_), v in values(tmp_path, rank).items() if layer == "b"] == [5, 5]


def test_groups_of_calls(tmp_path):
    """Overlapping groups, used in different orders on different ranks, do not block each other."""
    run_ranks(
        3,
        """
        groups = {pair: dist.new_group(pair) for pair in [(0, 1), (1, 2), (0, 2)]}
        mine = [pair for pair in groups if rank in pair]
        debug_api.initialize(config(stats=["l1_norm"]), log_dir=folder)
        for i in range(3):
            for pair in (mine if (rank + i) % 2 else mine[::-1]):
                x = torch.full((1,), 10.0 ** rank)
                debug_api.log_tensor_stats(f"{pair}", tensor=x, tensor_name="activation", reduction_group=groups[pair])
            debug_api.step()
        debug_api.end_debug()
        del groups
        """,
        tmp_path,
    )
    expected = {"(0, 1)": 11.0, "(1, 2)": 110.0, "(0, 2)": 101.0}
    for rank in range(3):
        found = values(tmp_path, rank)
        assert len(found) == 6
        assert all(value == expected[layer] for (_, layer, *_), value in found.items())


def test_the_group_that_was_set(tmp_path):
    """set_tensor_reduction_group chooses the ranks; a group without this rank is an error."""
    run_ranks(
        3,
        """
        pair, rest = dist.new_group([0, 1]), dist.new_group([2])
        debug_api.initialize(config(stats=["numel"]), log_dir=folder)
        assert debug_api.get_tensor_reduction_group() is None
        mine, other = (pair, rest) if rank < 2 else (rest, pair)
        x = torch.ones(1)
        for call in (
            lambda: debug_api.set_tensor_reduction_group(other),
            lambda: debug_api.log_tensor_stats("a", tensor=x, tensor_name="activation", reduction_group=other),
        ):
            try:
                call()
            except ValueError as error:
                assert f"rank: {rank}" in str(error), error
            else:
                raise AssertionError
        debug_api.set_tensor_reduction_group(mine)
        assert debug_api.get_tensor_reduction_group() is mine
        debug_api.log_tensor_stats("a", tensor=torch.ones(1), tensor_name="activation")
        debug_api.step()
        debug_api.end_debug()
        del pair, rest, mine, other, call
        """,
        tmp_path,
    )
    assert [list(values(tmp_path, rank).values()) for rank in range(3)] == [[2], [2], [1]]


COUNTED = """
        import torch.distributed.distributed_c10d as c10d
        sizes = []
        plain = dist.all_gather
        def counted(parts, sent, **kwargs):
            sizes.append(sent.numel() * sent.element_size())
            return plain(parts, sent, **kwargs)
        dist.all_gather = counted
"""


def test_off_steps_exchange_nothing(tmp_path):
    """Where no rule includes a step, nothing is sent."""
    run_ranks(
        2,
        COUNTED
        + """
        debug_api.initialize(config(freq=5), log_dir=folder)
        counts = []
        for i in range(11):
            debug_api.log_tensor_stats("fc1", tensor=torch.ones(4), tensor_name="activation")
            before = len(sizes)
            debug_api.step()
            counts.append(len(sizes) - before)
        assert [i for i, count in enumerate(counts) if count] == [0, 5, 10], counts
        assert counts[5] == counts[10] == 2, counts  # names are known
        debug_api.end_debug()
        """,
        tmp_path,
    )


def test_bytes_do_not_depend_on_sizes(tmp_path):
    """What is sent in a step is the same for small and for large tensors, and names are sent once."""
    run_ranks(
        2,
        COUNTED
        + """
        debug_api.initialize(config(), log_dir=folder)
        sent = []
        for size in (2, 2, 1_000_000):
            for layer in range(5):
                debug_api.log_tensor_stats(f"layer{layer}", tensor=torch.ones(size), tensor_name="activation")
            before = sum(sizes)
            debug_api.step()
            sent.append(sum(sizes) - before)
        assert sent[1] == sent[2] < sent[0], sent
        assert sent[2] <= 5 * 12 * 8 + 32, sent
        debug_api.end_debug()
        """,
        tmp_path,
    )


def test_memory_stays_the_same(tmp_path):
    """Names that change in every step are not remembered for ever."""
    run_ranks(
        2,
        """
        from pipesight.stats.rank_exchange import RankExchange, REMEMBERED
        exchange = RankExchange(dist.group.WORLD, timeout=20)
        for i in range(2 * REMEMBERED):
            everyone = exchange.all([f"{rank} {i}"], [[float(i)]], iteration=i)
            assert everyone == [((f"{r} {i}",), [[float(i)]]) for r in range(2)]
        assert len(exchange._known) <= REMEMBERED + 2
        del exchange
        """,
        tmp_path,
    )


MISSING = """
        from pathlib import Path
        from pipesight.stats import MissingRankError
        import time
        debug_api.initialize(config(), log_dir=folder, reduction_timeout=3)
        def log():
            debug_api.log_tensor_stats("fc1", tensor=torch.ones(4), tensor_name="activation")
            debug_api.step()
        dist.barrier()
        log()
"""


def test_a_rank_that_does_not_come(tmp_path):
    """A rank that never calls step() is named, within the timeout."""
    outputs = run_ranks(
        3,
        MISSING
        + """
        def wait_for_both():  # rank 1 must not have gone before, nor rank 0, which has the store
            while len(list(Path(folder).glob("raised*"))) < 2:
                time.sleep(0.05)
            os._exit(0)
        if rank == 1:
            wait_for_both()
        try:
            log()
        except MissingRankError as error:
            print(error, flush=True)
        else:
            raise AssertionError
        Path(folder, f"raised{rank}").touch()
        wait_for_both()
        """,
        tmp_path,
    )
    for rank in (0, 2):
        assert outputs[rank][0].startswith("rank 1 did not call step()"), outputs[rank][0]
        assert "over ranks [0, 1, 2]" in outputs[rank][0]


@pytest.mark.parametrize("dies", [1, 2])
def test_a_rank_that_died(dies, tmp_path):
    """A rank that is gone is named; one that is only late is not."""
    outputs = run_ranks(
        3,
        MISSING
        + f"""
        if rank == {dies}:
            os._exit(1)
        time.sleep(rank * 0.5 + 0.5)
        try:
            log()
        except MissingRankError as error:
            print(error)
        else:
            raise AssertionError
        sys.stdout.flush()
        time.sleep(2)
        os._exit(0)
        """,
        tmp_path,
        codes=[1 if rank == dies else 0 for rank in range(3)],
    )
    assert outputs[0][0].startswith(f"rank {dies} did not call step()"), outputs[0]


def test_a_second_session_names_the_missing_too(tmp_path):
    """What the last session left in the store does not hide who is missing."""
    outputs = run_ranks(
        2,
        MISSING
        + """
        log(), log()
        debug_api.end_debug()
        debug_api.initialize(config(), log_dir=folder, reduction_timeout=2)
        if rank == 1:
            time.sleep(5)
            os._exit(0)
        try:
            log()
        except MissingRankError as error:
            print(error)
        sys.stdout.flush()
        os._exit(0)
        """,
        tmp_path,
    )
    assert outputs[0][0].startswith("rank 1 did not call step()"), outputs[0]


def test_different_iterations_are_an_error(tmp_path):
    """Ranks that pass different iterations are told, and no half value is logged."""
    outputs = run_ranks(
        2,
        """
        debug_api.initialize(config(), log_dir=folder, reduction_timeout=10)
        debug_api.log_tensor_stats("fc1", tensor=torch.ones(4), tensor_name="activation", iteration=5 + rank)
        try:
            debug_api.step()
        except RuntimeError as error:
            print(error)
        """,
        tmp_path,
    )
    for rank in range(2):
        assert "rank 0: 5, rank 1: 6" in outputs[rank][0]
        assert not lines(tmp_path, rank)


def test_passed_iterations_without_step(tmp_path):
    """Ranks that pass iterations and never call step() merge too, whatever layers each has and wherever they begin."""
    run_ranks(
        2,
        """
        debug_api.initialize(config(stats=["numel"], layers="a|b", freq=2), log_dir=folder, reduction_timeout=20)
        for i in range(1001, 1006):
            for layer in ["a", "other"] if rank == 0 or i > 1003 else ["other", "other"]:
                debug_api.log_tensor_stats(layer, tensor=torch.ones(1), tensor_name="activation", iteration=i)
        debug_api.end_debug()
        """,
        tmp_path,
    )
    assert {k[0]: v for k, v in values(tmp_path, 0).items()} == {1002: 1, 1004: 2}
    assert {k[0]: v for k, v in values(tmp_path, 1).items()} == {1004: 2}


def test_other_statistics(tmp_path):
    """Statistics of float8 casts, of blocks, and higher moments merge as well."""
    stats = ["kurtosis", "zeros%", "nans", "infs", "dynamic_range", "rms", "max_blockwise_dynamic_range"]
    fp8 = ["mxfp8_underflows%", "mxfp8_mse", "mxfp8_scale_inv_min", "mxfp8_scale_inv_max"]
    run_ranks(
        2,
        f"""
        chosen = config(stats={stats})
        chosen["s"]["transformer_engine"] = {{
            "LogFp8TensorStats": {{"enabled": True, "tensors": ["activation"], "stats": {fp8}}}
        }}
        debug_api.initialize(chosen, log_dir=folder)
        torch.manual_seed(0)
        x = torch.randn(8, 64) * torch.logspace(-6, 6, 64)
        x[0, :5] = torch.tensor([0.0, float("nan"), float("inf"), 0.0, -float("inf")])
        parts = [x[:3], x[3:]]
        debug_api.log_tensor_stats("fc1", tensor=parts[rank], tensor_name="activation")
        debug_api.log_tensor_stats("whole", tensor=x, tensor_name="activation", skip_reduction=True)
        debug_api.step()
        debug_api.end_debug()
        """,
        tmp_path,
    )
    for rank in range(2):
        found = values(tmp_path, rank)
        for name in stats + fp8:
            (merged,) = [v for k, v in found.items() if k[1] == "fc1" and k[3].startswith(name)]
            (whole,) = [v for k, v in found.items() if k[1] == "whole" and k[3].startswith(name)]
            assert merged == pytest.approx(whole, rel=1e-9), name


def test_nan_in_one_shard(tmp_path):
    """NaN of one rank is counted on all, left out of the rest, and said once."""
    outputs = run_ranks(
        2,
        """
        debug_api.initialize(config(stats=["mean", "nans"]), log_dir=folder)
        for _ in range(2):
            x = torch.tensor([1.0, float("nan")]) if rank else torch.tensor([2.0, 3.0])
            debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation")
            debug_api.step()
        debug_api.end_debug()
        """,
        tmp_path,
    )
    for rank in range(2):
        assert [line["value"] for line in lines(tmp_path, rank)] == [2.0, 1.0] * 2
        assert {line["nans"] for line in lines(tmp_path, rank)} == {1}
    assert [error.count("1 NaN and 0 Inf of 2 numbers; on rank 1\n") for _, error in outputs] == [0, 1]


def test_dtensors(tmp_path):
    """A DTensor has the statistics of the whole tensor, on every rank, whatever its placement."""
    run_ranks(
        2,
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        mesh = init_device_mesh("cpu", (2,))
        x = torch.arange(15.0).view(5, 3).cos()
        chosen = config(stats=[*SIX, "numel"])
        chosen["s"]["transformer_engine"] = {
            "LogFp8TensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["mxfp8_mse"]}
        }
        debug_api.initialize(chosen, log_dir=folder)
        for i in range(2):
            for placement in (Shard(0), Shard(1), Replicate()):
                tensor = distribute_tensor(x, mesh, [placement])
                debug_api.log_tensor_stats(str(placement), tensor=tensor, tensor_name="activation")
            debug_api.step()
        debug_api.end_debug()
        sys.stdout.flush()
        dist.barrier()
        os._exit(0)  # a mesh keeps process groups, and torch may abort at exit over them
        """,
        tmp_path,
    )
    for rank in range(2):
        found = values(tmp_path, rank)
        layers = {layer for _, layer, *_ in found}
        assert len(layers) == 3
        for i, layer in itertools.product(range(2), layers):
            assert_six(found, i, layer, "activation", torch.arange(15.0).view(5, 3).cos())
            assert found[i, layer, "activation", "numel"] == 15
            assert found[i, layer, "activation", "mxfp8_mse"] > 0


def test_partial_dtensors(tmp_path):
    """A sum that has not been done has no statistics: an error says what to pass; a watch leaves it out."""
    outputs = run_ranks(
        2,
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        debug_api.initialize(config(), log_dir=folder)
        try:
            debug_api.log_tensor_stats("fc1", tensor=tensor, tensor_name="activation")
        except ValueError as error:
            print(error)
        model = nn.Sequential(nn.Identity())
        with debug_api.watch(model):
            model(tensor)
        debug_api.end_debug()
        sys.stdout.flush()
        dist.barrier()
        os._exit(0)  # a mesh keeps process groups, and torch may abort at exit over them
        """,
        tmp_path,
    )
    for rank in range(2):
        assert "redistribute" in outputs[rank][0]
        assert "is skipped" in outputs[rank][1]
        assert not lines(tmp_path, rank)


def test_one_rank(tmp_path):
    """A group of one rank merges nothing."""
    run_ranks(
        1,
        """
        dist.all_gather = None
        debug_api.initialize(config(stats=["numel"]), log_dir=folder)
        debug_api.log_tensor_stats("fc1", tensor=torch.ones(3), tensor_name="activation")
        debug_api.step()
        debug_api.end_debug()
        """,
        tmp_path,
    )
    assert list(values(tmp_path).values()) == [3]


def test_after_the_group_is_gone(tmp_path):
    """Once torch.distributed is shut down, a rank logs what it has."""
    run_ranks(
        2,
        """
        debug_api.initialize(config(stats=["numel"]), log_dir=folder)
        debug_api.log_tensor_stats("fc1", tensor=torch.ones(3), tensor_name="activation")
        debug_api.step()
        dist.destroy_process_group()
        debug_api.log_tensor_stats("fc1", tensor=torch.ones(3), tensor_name="activation")
        debug_api.step()
        debug_api.end_debug()
        """,
        tmp_path,
    )
    for rank in range(2):
        assert list(values(tmp_path, rank).values()) == [6, 3]


def test_the_end_merges_too(tmp_path):
    """end_debug() merges what no step() has; a process that just ends says what it loses."""
    outputs = run_ranks(
        2,
        """
        for way in ("a", "b"):
            debug_api.initialize(config(stats=["numel"]), log_dir=f"{folder}/{way}")
            debug_api.log_tensor_stats("fc1", tensor=torch.ones(3), tensor_name="activation")
            debug_api.log_tensor_stats("own", tensor=torch.ones(3), tensor_name="activation", skip_reduction=True)
            if way == "a":
                debug_api.end_debug()
        """,
        tmp_path,
    )
    for rank in range(2):
        assert sorted(values(tmp_path / "a", rank).values()) == [3, 6]
        assert list(values(tmp_path / "b", rank).values()) == [3]
        assert "1 tensors were not merged over ranks" in outputs[rank][1]


def test_threads_of_a_step_do_not_mix_groups(tmp_path):
    """Two sessions over the same ranks exchange apart."""
    run_ranks(
        2,
        """
        from pipesight.stats.api import open_session
        sessions = [open_session(config(stats=["numel"]), log_dir=f"{folder}/{i}") for i in range(2)]
        for i in range(3):
            for n, session in enumerate(sessions):
                session.log_tensor_stats("x", torch.ones(n + 1), "activation")
                session.step()
        for session in sessions:
            session.close()
        """,
        tmp_path,
    )
    for rank in range(2):
        assert list(values(tmp_path / "0", rank).values()) == [2, 2, 2]
        assert list(values(tmp_path / "1", rank).values()) == [4, 4, 4]


def test_one_writer_on_the_last_stage(tmp_path):
    """Two stages of two ranks, started as by torchrun: each reduces over its own, and the last has the writers."""
    script = tmp_path / "script.py"
    body = """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    class Writer:
        def __init__(self):
            self.seen = []
        def add_scalar(self, tag, scalar_value, global_step=None):
            self.seen.append((tag, scalar_value, global_step))
        def flush(self):
            pass
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    writer = Writer() if rank >= 2 else None
    debug_api.initialize(config(stats=["l1_norm"]), extensions=[], log_dir=folder, tb_writer=writer)
    debug_api.set_tensor_reduction_group(stages[rank // 2])
    for i in range(2):
        x = torch.full((1,), 10.0 ** rank)
        debug_api.log_tensor_stats(f"stage{rank // 2}", tensor=x, tensor_name="activation")
        debug_api.step()
    debug_api.end_debug()
    if writer:
        assert writer.seen == [("stage1/activation/l1_norm", 1100.0, i) for i in range(2)], writer.seen
    del stages  # a group that outlives this line may make torch abort at exit
    dist.destroy_process_group()
    """
    script.write_text(RANK + textwrap.dedent(body))
    for done in warm.torchrun(4, str(script), env={**os.environ, "INIT": "0", "FOLDER": str(tmp_path)}):
        assert done.returncode == 0, done.stderr
    for rank, expected in enumerate([11.0, 11.0, 1100.0, 1100.0]):
        assert list(values(tmp_path, rank).values()) == [expected] * 2


def test_six_of_many_tensors(tmp_path):
    """Many tensors of different sizes go in one exchange, each to its own."""
    run_ranks(
        2,
        """
        debug_api.initialize(config(), log_dir=folder)
        generator = torch.Generator().manual_seed(7)
        for layer in range(30):
            x = torch.randn(layer + 2, generator=generator) + layer
            debug_api.log_tensor_stats(f"{layer}", tensor=x[rank::2], tensor_name="activation")
        debug_api.step()
        debug_api.end_debug()
        """,
        tmp_path,
    )
    generator = torch.Generator().manual_seed(7)
    found = values(tmp_path, 1)
    for layer in range(30):
        x = torch.randn(layer + 2, generator=generator) + layer
        assert found[0, str(layer), "activation", "std"] == pytest.approx(six(x)["std"], rel=1e-6)
