"""The context of tasks on real processes, and what reads it: observers, log lines, spans, statistics."""

from support.torchrun import RANK, torchrun

BEGIN = (
    RANK
    + '''
import collections, logging
from pipesight import GPipe, trace
from pipesight.testing import capture_events
from pipesight.trace import ai
mse = nn.functional.mse_loss


class Everything(context.Observer):
    """Keeps all that it is told, in order."""

    def __init__(self):
        self.seen = []

    def keep(self, event, where):
        self.seen.append(
            (event, where.step, where.partition, where.microbatch, where.phase, where.layer, where.checkpointing)
        )

    def task_started(self, where):
        assert where.microbatches == 4 and context.current() is where
        self.keep("task_started", where)

    def task_ended(self, where):
        self.keep("task_ended", where)

    def layer_started(self, where):
        self.keep("layer_started", where)

    def layer_ended(self, where):
        self.keep("layer_ended", where)


def tasks_of(seen):
    """Return what was told of each task, whatever order tasks came in."""
    tasks = collections.defaultdict(list)
    for told in seen:
        tasks[told[1:5]].append(told)
    return tasks


def observed(run):
    observer = Everything()
    context.attach(observer)
    for x, y in batches([8, 8]):
        run(x, y)
    context.detach(observer)
    return observer.seen
'''
)


def test_as_gpipe_tells_it(tmp_path):
    """Observers hear of each task and layer what GPipe tells, in the order of its schedule; zero bubbles add more."""
    torchrun(
        2,
        """
        for name in ("gpipe", "1f1b", "interleaved-zero-bubble"):
            n = 4 if "zero" in name else 2
            for checkpoint in ("never", "except_last"):
                gpipe = GPipe(tanhs(n), [1] * n, devices=["cpu"] * n, chunks=4, checkpoint=checkpoint)
                expected = tasks_of(observed(lambda x, y: mse(gpipe(x), y).backward()))
                pipeline = DistributedPipeline(
                    tanhs(n), [1] * n, chunks=4, schedule=name, loss_fn=mse, checkpoint=checkpoint
                )
                seen = observed(lambda x, y: pipeline.step(x, y))
                found = tasks_of(seen)
                weights = {key: found.pop(key) for key in list(found) if key[3] == "weight"}
                # The backward of a first partition is all about weights, so a schedule that splits it moves it there.
                moved = {key: told for key, told in weights.items() if key[1] == 0}
                mine = {key: told for key, told in expected.items() if key[1] in pipeline.partitions}
                assert found.keys() == mine.keys(), (name, found.keys() ^ mine.keys())
                for key, told in mine.items():
                    there = (*key[:3], "weight")
                    if key[3] == "backward" and there in moved:
                        assert [told[0] for told in found[key]] == ["task_started", "task_ended"]
                        assert moved[there] == [(*t[:4], "weight", *t[5:]) for t in told], (name, moved[there], told)
                    else:
                        assert found[key] == told, (name, key, found[key], told)
                assert ("zero" in name) == bool(weights)
                if name == "1f1b":
                    order = [told[4][0].upper() + str(told[3]) for told in seen if told[0] == "task_started"]
                    again = checkpoint != "never"
                    assert order[: len(order) // 2] == (
                        (["F0", "F1", "R0", "B0", "F2", "R1", "B1", "F3", "R2", "B2", "B3"] if rank == 0 else
                         ["F0", "R0", "B0", "F1", "R1", "B1", "F2", "R2", "B2", "F3", "B3"]) if again else
                        (["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"] if rank == 0 else
                         ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"])
                    ), order
        """,
        tmp_path,
        begin=BEGIN,
    )


def test_recomputations_do_not_wait_for_gradients(tmp_path):
    """A rank recomputes a micro-batch before it waits for the gradient from the next rank, however the model is cut."""
    torchrun(
        2,
        """
        class Order(context.Observer):
            def __init__(self):
                self.seen = []
            def task_started(self, where):
                self.seen.append((where.phase, where.partition, where.microbatch))
            def transfer_started(self, where, source, target, size):
                self.seen.append(("received", where.partition, where.microbatch))

        for name, n in (("gpipe", 2), ("1f1b", 2), ("interleaved-zero-bubble", 4)):
            for way in ({"balance": [1] * n, "loss_fn": mse}, {"cuts": [str(j) for j in range(1, n)]}):
                layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(n)))
                by_cuts = {} if "balance" in way else {"loss": lambda output: output.square().mean()}
                pipeline = DistributedPipeline(
                    layers, chunks=4, schedule=name, checkpoint="always", **way, **by_cuts
                )
                order = Order()
                context.attach(order)
                pipeline.step(torch.randn(8, 8), *([torch.randn(8, 8)] if "balance" in way else []))
                context.detach(order)
                for j in pipeline.partitions:
                    if j == n - 1:
                        continue
                    for i in range(4):
                        again = order.seen.index(("recompute", j, i))
                        come = [k for k, told in enumerate(order.seen) if told == ("received", j, i)]
                        assert again < come[-1] < order.seen.index(("backward", j, i)), (name, way, order.seen)
        """,
        tmp_path,
        begin=BEGIN,
    )


def test_spans_logs_and_statistics(tmp_path):
    """Tasks, layers, transfers, sends and waits are recorded on every rank; so are log lines and statistics."""
    torchrun(
        2,
        """
        lines = []
        class Lines(logging.Handler):
            def emit(self, record):
                lines.append((record.getMessage(), record.partition, record.microbatch))
        logger = logging.getLogger("pipesight.pipeline")
        logger.addHandler(Lines())
        logger.setLevel(logging.INFO)
        pipeline = DistributedPipeline(tanhs(4), [2, 2], chunks=4, loss_fn=mse)
        with capture_events() as events, trace.instrument():
            for x, y in batches([8, 8]):
                pipeline.step(x, y)
        assert len(lines) == 8
        assert lines[0] == (
            f"Micro-batch 0 (partition {rank}): checkpoint_stop=0, using_checkpointing=False", rank, 0
        ), lines[0]
        spans = [event for event in events if event["ph"] == "X"]
        def of(name, category):
            return [e for e in spans if e["name"] == name and e["cat"] == category]
        for name in ("forward", "backward"):
            tasks = [e["args"] for e in of(name, "compute")]
            found = [(a["step"], a["partition"], a["microbatch"]) for a in tasks if "partition" in a]
            assert sorted(found) == [(step, rank, i) for step in range(2) for i in range(4)], found
            assert len(tasks) == len(found)  # modules are not recorded a second time
            layers = [e["args"] for e in of(f"{name}.layer", "compute")]
            assert len(layers) == 16 and {a["layer"] for a in layers} == {str(2 * rank), str(2 * rank + 1)}
        transfers = [e["args"] for e in of("transfer", "device")]
        other = 1 - rank
        assert len(transfers) == 8, transfers
        assert all((a["from"], a["to"]) == (f"rank {other}", f"rank {rank}") for a in transfers)
        assert all(a["size"] == 2 * 6 * 8 and a["partition"] == rank for a in transfers)
        tasks = [(step, rank, i) for step in range(2) for i in range(4)]
        for name in ("send", "receive", "send.wait", "receive.wait"):
            places = [e["args"] for e in of(name, "comm")]
            assert sorted((a["step"], a["partition"], a["microbatch"]) for a in places) == tasks, (name, places)
            assert all(a["peer"] == other and a["size"] == 2 * 6 * 8 for a in places), (name, places)

        import pipesight.stats as stats
        from support.logged import config, values
        stats.initialize(config(["activation", "gradient"], ["mean"]), log_dir=folder)
        watch = stats.watch(pipeline.module, auto_step=False)
        stats.set_tensor_reduction_group(pipeline.data_parallel_group)
        outputs = {}
        plain = tanhs(4)
        for k, layer in enumerate(plain):
            layer.register_forward_hook(lambda module, _, output, k=k: outputs.__setitem__(k, output))
        pipeline.step(x, y)
        stats.step()
        stats.end_debug()
        found = values(folder, rank)
        plain(x)
        for k in (2 * rank, 2 * rank + 1):
            torch.testing.assert_close(found[0, f"{k}", "activation", "mean"], outputs[k].mean().item())
            assert (0, f"{k}", "gradient", "mean") in found
        assert len({layer.split(".")[0] for _, layer, *_ in found}) == 2
        """,
        tmp_path,
        begin=BEGIN,
    )
