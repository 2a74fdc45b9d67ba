"""The page of a run that a server follows: its last steps while it is running, all of it once it has ended."""

from __future__ import annotations

from typing import Any

from pipesight.runs.following.follower import Follower

__all__ = ["draw", "empty_page"]


def empty_page() -> str:
    """Return the page, which asks the server for its payload."""
    from pipesight.view.page import Served, page_html

    return page_html(None, served=Served())


def draw(follower: Follower) -> dict[str, Any] | None:
    """Return the payload of the page; nothing while there is nothing to show."""
    from pipesight.analysis.analyse import analyse
    from pipesight.runs.reading.run import NotARunError, open_run
    from pipesight.view.page import page_payload

    if follower.state.phase == "ended":
        try:
            with open_run(follower.path) as run:
                payload: dict[str, Any] = page_payload(run, analyse(run))
                return payload
        except NotARunError:
            return None
    if not follower.run.steps():
        return None
    payload = page_payload(follower.run, analyse(follower.run))
    return payload
