"""Ranks that stay alive and run one case after the other: starting them takes longer than most cases."""

from __future__ import annotations

import os
import tempfile
import traceback
import warnings
from multiprocessing.connection import Client, Listener
from pathlib import Path

from support import warm

__all__ = ["Pool", "RankError"]

RANKS = 4
PATIENCE = 60.0
"""Seconds for a case."""
CASES = 200
"""Cases after which ranks are started anew, so that what they keep does not add up."""


class RankError(AssertionError):
    """A rank raised, died, or did not answer."""


class Pool:
    """As many ranks, which wait for cases."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._ranks = []
        self._connections = []
        self._ran = 0

    def run(self, case):
        """Run a case on its ranks; return what each of them found."""
        if self._ran % CASES == 0:
            self.stop()
            self._start()
        self._ran += 1
        size = case["pp"] * case["dp"]
        for connection in self._connections:
            connection.send((self._ran, case))
        found = []
        try:
            for rank, connection in enumerate(self._connections):
                if not connection.poll(PATIENCE):
                    raise RankError(f"rank {rank} does not answer")
                found.append(connection.recv())
            if errors := [answer for answer in found if isinstance(answer, str)]:
                raise RankError("\n".join(errors))
        except (RankError, EOFError, OSError) as error:
            self.stop()
            self._ran = 0
            raise error if isinstance(error, RankError) else RankError(f"a rank died: {error!r}") from None
        return found[:size]

    def _start(self) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address = os.path.join(self._folder.name, f"socket{self._ran}")
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        shared = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "POOL": address, "OMP_NUM_THREADS": "1"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        with Listener(address) as listener:
            self._ranks = [warm.start(__file__, env={**shared, "RANK": str(rank)}) for rank in range(RANKS)]
            there = {}
            for _ in range(RANKS):
                connection = listener.accept()
                there[connection.recv()] = connection
        self._connections = [there[rank] for rank in range(RANKS)]

    def close(self) -> None:
        """End the ranks, and leave nothing behind."""
        self.stop()
        self._folder.cleanup()

    def stop(self) -> None:
        """End the ranks."""
        for connection in self._connections:
            connection.close()
        for rank in self._ranks:
            rank.end()
        self._ranks, self._connections = [], []


# On the ranks.


def serve() -> None:
    """Run cases until nobody sends any; each in a process group of its own, of as many ranks as it needs."""
    import torch
    import torch.distributed as dist

    from fuzz import rank_steps

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # it warns of views that are changed in place: none is
    rank, store = int(os.environ["RANK"]), dist.TCPStore("127.0.0.1", int(os.environ["PORT"]))
    with Client(os.environ["POOL"]) as connection:
        connection.send(rank)
        while True:
            try:
                number, case = connection.recv()
            except EOFError:
                os._exit(0)
            size = case["pp"] * case["dp"]
            if rank >= size:
                connection.send({})
                continue
            try:
                own = dist.PrefixStore(str(number), store)
                dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
                found = rank_steps.run(case)
                dist.destroy_process_group()
                connection.send(found)
            except BaseException:
                connection.send(f"rank {rank}: {traceback.format_exc()}")


if __name__ == "__main__":
    serve()
