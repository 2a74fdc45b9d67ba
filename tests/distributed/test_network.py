"""A pipeline over two hosts with a bad network between them, in a real job of two nodes."""

import re

import pytest
import torch

from pipesight.analysis.analyse import analyse
from pipesight.analysis.planned_changes import AT_MOST
from pipesight.runs.reading.run import open_run
from support.commands import pipesight
from support.network import Link, two_hosts
from support.nodes import nodes
from support.torchrun import END, RANK, batches, tanhs, train_plainly

STEPS, LAYERS = 4, 4

TRAIN = f"""
import os, socket
def say(*words):  # a line at once: the other rank of the host writes there, too
    os.write(1, " ".join(map(str, [*words, "\\n"])).encode())
width, samples, steps = map(int, sys.argv[1:])
pipeline = DistributedPipeline(tanhs({LAYERS}, width), [1] * size, chunks=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.Adam(pipeline.parameters(), 1e-2)
for x, y in batches([samples] * steps, width):
    optimizer.zero_grad()
    loss = pipeline.step(x if pipeline.is_first else None, y if pipeline.is_last else None)
    optimizer.step()
    if pipeline.is_last:
        say(loss.item())
say("host", socket.gethostname(), "rank", rank)
"""


@pytest.fixture(scope="module")
def hosts():
    with two_hosts(Link(delay=0.01, loss=0.01, rate=20e6)) as both:
        yield both


def run_job(hosts, folder, *, width=6, samples=16, steps=STEPS, **settings):
    """Train with two ranks on each of two hosts; return what each node printed.

    Record it with ``through=("-m", "pipesight", "run", "--out", RUN)``.
    """
    script = folder / "train.py"
    script.write_text(RANK + TRAIN + END)
    with nodes(hosts, [script, width, samples, steps], folder, ranks=LAYERS // 2, **settings) as job:
        return job.ends_well()


def plain_losses():
    model = tanhs(LAYERS)
    return train_plainly(model, batches([16] * STEPS), torch.optim.Adam(model.parameters(), 1e-2))


def test_losses_over_a_bad_link(hosts, tmp_path):
    """Two hosts train as the plain model does, though packets between them are late, few at a time, or lost."""
    outputs = run_job(hosts, tmp_path)
    lines = [line.strip() for output in outputs for line in output.splitlines() if not line.startswith("[Gloo]")]
    places = sorted(line for line in lines if line.startswith("host"))
    # Which host becomes the first is for torchrun to say, but ranks of one host are neighbours.
    halves = [{f"host {name} rank {rank}" for rank in ranks} for name in ("near", "far") for ranks in ((0, 1), (2, 3))]
    assert set(places) in (halves[0] | halves[3], halves[1] | halves[2]), places
    losses = [float(line) for line in lines if not line.startswith("host")]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain_losses()))


@pytest.fixture(scope="module")
def recorded(hosts, tmp_path_factory):
    """Record a job whose messages are 128 KiB each, which take 52 ms to pass and 10 ms to arrive."""
    folder = tmp_path_factory.mktemp("recorded")
    run = folder / "RUN"
    run_job(hosts, folder, width=256, samples=256, steps=6, through=("-m", "pipesight", "run", "--out", run))
    return run


def test_the_bad_link_is_named(recorded):
    """The report names the link between the hosts, both ways, and no other, though other losses go on adding up."""
    with open_run(recorded) as run:
        report = analyse(run)
    assert len(report.links) == 6
    links = {(link.source, link.target): link for link in report.links}
    bad = [links.pop((1, 2)), links.pop((2, 1))]
    assert [link.notable for link in bad] == [True, True]
    assert not any(link.notable for link in links.values())
    for link in bad:
        assert {link.source_host, link.target_host} == {"near", "far"}
        assert link.size == 256 // 4 * 256 * 8
        # It cannot be faster than the wire, but for what clocks may be off.
        assert link.time + link.error >= 8e6 * link.size / 20e6 + 10_000
        assert link.time > 3 * max(other.time or 0 for other in links.values())  # None: less than clocks tell
    assert report.steps.parts.sum(axis=0) == pytest.approx(report.steps.period, rel=1e-9)
    (pipeline,) = report.pipelines
    for row in pipeline.rows:
        assert row.busy + sum(row.losses.values()) == pytest.approx(pipeline.window.mean)
    # What follows the last step is not known, so that step counts here and not for the advice.
    collectives = report.overall.parts["communication"] / report.overall.time.mean
    shares = sum(link.share for link in bad)
    assert min(shares, 1.0) <= report.verdict.changes[0].gain <= 1.0  # both ways at once, over all ranks: more than all
    assert report.verdict.changes[0].gain == pytest.approx(min(shares + collectives, 1.0), abs=0.1)
    assert max(link.share for link in bad) > 0.2


def test_what_the_bad_link_costs(recorded, tmp_path):
    """Over a good network, the job is faster, and by no more than the advice to look at the bad one promised."""
    with two_hosts(Link()) as hosts:
        run = tmp_path / "RUN"
        run_job(hosts, tmp_path, width=256, samples=256, steps=6, through=("-m", "pipesight", "run", "--out", run))
    reports = []
    for path in (recorded, run):
        with open_run(path) as opened:
            reports.append(analyse(opened))
    bad, good = (report.overall.time.median for report in reports)
    change = reports[0].verdict.changes[0]
    assert change.promise == AT_MOST
    print(f"| links | {change.what} | at most {change.gain:.0%} | {1 - good / bad:.0%} |")
    assert 0.2 < 1 - good / bad <= change.gain + 0.05


def test_the_bad_link_in_the_terminal(recorded):
    """`pipesight report` says which ranks on which hosts, and where to look."""
    done = pipesight("report", recorded, "--width", 120)
    assert done.returncode == 0, done.stderr
    assert "check the network between far and near;" in done.stdout
    section = done.stdout[done.stdout.index("\nLinks\n") :].split("\n\n")[0].splitlines()[2:]
    assert len(section) == 2
    for line in section:
        assert re.fullmatch(r"  rank [12] on (near|far) -> rank [12] on (near|far): .* for 128 KiB, others .*", line)
