"""`DumpTensors` writes the tensors themselves, where Transformer Engine would, within a disk quota."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipesight import GPipe
from pipesight.stats import ConfigError, watch
from pipesight.stats.api import open_session


def dumping(layers=".*", tensors=("activation",), **settings):
    feature = {"enabled": True, "tensors": list(tensors), **settings}
    selected = {"enabled": True, "layers": {"layer_name_regex_pattern": layers}}
    return {"dump": {**selected, "transformer_engine": {"DumpTensors": feature}}}


def files(folder):
    root = folder / "tensor_dumps" / "rank_0"
    return {str(path.relative_to(root)): torch.load(path) for path in root.rglob("*.pt")}


def test_files_of_a_plain_model(tmp_path):
    """Selected tensors, at selected steps, bit for bit; the end of a range is in it, as Transformer Engine has it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = {}
    model[0].register_forward_hook(lambda _, args, out: seen.update({("activation", step): out.detach().clone()}))
    settings = dumping(layers="0", tensors=["activation", "wgrad"], start_end_list=[[1, 2]], freq=2)
    with watch(model, settings, log_dir=tmp_path):
        for step in range(5):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().sum().backward()
            seen["wgrad", step] = model[0].weight.grad.clone()
            optimizer.step()
    found = files(tmp_path)
    assert set(found) == {"iter_000002/0_activation.pt", "iter_000002/0_wgrad.pt"}
    for name in ("activation", "wgrad"):
        entry = found[f"iter_000002/0_{name}.pt"]
        assert torch.equal(entry.pop("high_precision"), seen[name, 2])
        place = {"partition": None, "microbatch": None, "phase": None}
        assert entry == {"layer": "0", "tensor": name, "iteration": 2, "rank": 0, **place}


def test_micro_batches(tmp_path):
    """Each micro-batch has its file, which says which it is; together they are the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    x = torch.randn(6, 4)
    expected = model(x).detach()
    pipe = GPipe(model, [1, 1], chunks=3, checkpoint="always")
    with watch(pipe, dumping(layers="1"), log_dir=tmp_path):
        pipe(x).sum().backward()
    found = files(tmp_path)
    assert set(found) == {f"iter_000000/1_activation{end}.pt" for end in ("", ".1", ".2")}
    ordered = sorted(found.values(), key=lambda entry: entry["microbatch"])
    assert [(e["partition"], e["microbatch"], e["phase"]) for e in ordered] == [(1, i, "forward") for i in range(3)]
    torch.testing.assert_close(torch.cat([entry["high_precision"] for entry in ordered]), expected)


def test_names_of_files(tmp_path):
    """Names that would leave the folder, or meet in one file, or are too long, are files of their own."""
    layers = ["../up", "a.b", "a_b", "x" * 400]
    session = open_session(dumping(), log_dir=tmp_path)
    for number, layer in enumerate(layers):
        session.log_tensor_stats(layer, torch.full((2,), float(number)), "activation")
    session.close()
    found = files(tmp_path)
    assert sorted(entry["layer"] for entry in found.values()) == sorted(layers)
    assert all(entry["high_precision"][0] == layers.index(entry["layer"]) for entry in found.values())
    assert {"iter_000000/a_b_activation.pt", "iter_000000/a_b_activation.1.pt"} <= set(found)


def test_a_view_is_copied_alone(tmp_path):
    """Of a part of a large tensor, the part is written."""
    session = open_session(dumping(), log_dir=tmp_path)
    session.log_tensor_stats("fc", torch.zeros(1 << 20)[::1024], "activation")
    session.close()
    (path,) = (tmp_path / "tensor_dumps").rglob("*.pt")
    assert path.stat().st_size < 20_000


def test_disk_quota(tmp_path, capsys):
    """The files take max_bytes at most, with those of an earlier run; one warning says what to do."""
    most = 100_000
    for attempt in range(2):
        session = open_session(dumping(max_bytes=most), log_dir=tmp_path)
        for _ in range(10):
            session.log_tensor_stats(f"fc{attempt}", torch.zeros(5000), "activation")
            session.step()
        session.close()
        paths = list((tmp_path / "tensor_dumps").rglob("*.pt"))
        assert len(paths) == 4
        assert sum(path.stat().st_size for path in paths) <= most
        stderr = capsys.readouterr().err
        assert stderr.count("for lack of room") == 1
        assert "max_bytes: 100,000" in stderr
    session = open_session(dumping(max_bytes=most), log_dir=tmp_path)  # what it replaces makes room
    session.log_tensor_stats("fc0", torch.ones(5000), "activation")
    session.close()
    assert capsys.readouterr().err == ""
    assert files(tmp_path)["iter_000000/fc0_activation.pt"]["high_precision"][0] == 1


def test_disk_that_fails(tmp_path, capsys):
    """A file that cannot be written is a warning, once; training goes on."""
    (tmp_path / "tensor_dumps").write_text("in the way")
    session = open_session(dumping(), log_dir=tmp_path)
    for _ in range(3):
        session.log_tensor_stats("fc", torch.zeros(5), "activation")
    session.close()
    assert capsys.readouterr().err.count("tensors cannot be dumped") == 1


def test_quantized_tensors(tmp_path, capsys):
    """There are none without Transformer Engine: a warning says so, once."""
    session = open_session(dumping(quantized_tensor=True, high_precision_tensor=False), log_dir=tmp_path)
    for _ in range(2):
        session.log_tensor_stats("fc", torch.zeros(5), "activation")
    session.close()
    assert capsys.readouterr().err.count("writes no quantized tensors") == 1
    assert files(tmp_path) == {}


@pytest.mark.parametrize("wrong", [{"max_bytes": "1GB"}, {"max_bytes": -1}, {"quantized_tensor": "yes"}], ids=str)
def test_wrong_settings(wrong, tmp_path):
    """Mistakes are found when the configuration is read, wherever they stand."""
    for settings in (dumping(**wrong), dumping(tensors=["activation"])):
        feature = settings["dump"]["transformer_engine"]["DumpTensors"]
        if "quantized_tensor" not in feature and "max_bytes" not in feature:
            feature["tensors_struct"] = [{"tensor": feature.pop("tensors")[0], **wrong}]
        with pytest.raises(ConfigError, match=r"must be (true or false|an integer of 0 or more)"):
            open_session(settings, log_dir=tmp_path)
