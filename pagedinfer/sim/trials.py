"""What a change would have meant for one request: the run with that change, as far as the request's end and no further.

A trial is `fork(recording, first step, **changes)` without its recording: nobody listens to the events, only the
request is watched. What happens after its end makes no difference to it, but it does to others: `everyone` runs on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagedinfer.config import EngineConfig
from pagedinfer.engine.policy import Policy
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.sim.fork import changed_config
from pagedinfer.sim.player import Inputs, Player
from pagedinfer.sim.progress import Progress
from pagedinfer.sim.rerun import Driver
from pagedinfer.trace.metrics import Ledger, Life
from pagedinfer.trace.recording import Recording

__all__ = ["Outcome", "Trials"]

FAR_LONGER = 20
"""A run to the end is given up after so many times the recorded steps."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial went for the request, in steps from its submission; None: not in this run.

    Attributes:
        ttft, e2e: to its first token and to its end.
        num_tokens: output tokens.
        refused: ids of the recorded submissions (`id(event)`) that this engine refuses before the request's end, or
            whenever they come.
    """

    ttft: float | None
    e2e: float | None
    num_tokens: int
    refused: frozenset[int]


class Trials:
    """Runs a recording's requests again and again, each time for one of them.

    Args:
        rid, number: life `number` (from 0) of this id.
        make_policy: makes the policy of one's own with which the recording was made; None: the settings name it.
    """

    def __init__(
        self,
        recording: Recording,
        rid: str,
        number: int = 0,
        make_policy: Callable[[EngineConfig], Policy] | None = None,
    ) -> None:
        """Read the recording's inputs.

        Raises:
            RecordingError: it cannot be forked.
        """
        changed_config(recording, {})  # says so if it cannot
        self._recording = recording
        self._rid, self._number = rid, number
        self._make_policy = make_policy
        self._inputs = Inputs(recording)

    def run(self, changes: dict[str, Any], progress: Progress) -> Outcome | None:
        """The request's times with these settings; None when it is refused.

        Raises:
            ConfigError: an unknown setting or a bad value.
        """
        driver = self._driver(changes)
        player, fate = Player(self._inputs, driver), _Fate(driver.scheduler, self._rid, self._number)

        def looks() -> bool:
            progress(driver.scheduler.step)
            return fate.is_over()

        player.play(looks)
        if fate.submitted is None:
            return None
        refused = frozenset(map(id, [*player.refused, *player.never_fit()]))
        ttft, e2e = _gap(fate.submitted, fate.first_token), _gap(fate.submitted, fate.finished)
        return Outcome(ttft, e2e, fate.num_tokens, refused)

    def everyone(self, changes: dict[str, Any], progress: Progress) -> list[Life] | None:
        """The lives of all requests in the whole run with these settings, in order of submission.

        None: it takes far longer than the recorded one, perhaps for ever.
        """
        most = self._recording.last_step * FAR_LONGER + FAR_LONGER
        driver, ledger = self._driver(changes), Ledger()
        driver.bus.subscribe(ledger.add)  # a trial cancels no plan

        def looks() -> bool:
            progress(driver.scheduler.step)
            return driver.scheduler.step >= most

        Player(self._inputs, driver).play(looks)
        return None if driver.scheduler.step >= most else ledger.lives

    def _driver(self, changes: dict[str, Any]) -> Driver:
        config = changed_config(self._recording, changes)
        policy = None if self._make_policy is None else self._make_policy(config)
        return Driver([], config, policy, listens=False)


class _Fate:
    """Watches one life of an id in a scheduler: in which steps it came, got its first token and ended."""

    def __init__(self, scheduler: Scheduler, rid: str, number: int) -> None:
        self.submitted: int | None = None
        self.first_token: int | None = None
        self.finished: int | None = None
        self._scheduler, self._rid, self._left = scheduler, rid, number
        self._request: Request | None = None
        self._num_before = 0  # a copy of a live request begins with that one's tokens

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return 0 if self._request is None else self._request.num_output_tokens - self._num_before

    def is_over(self) -> bool:
        """Look again, after each input and each step. Returns whether it has ended."""
        request, step = self._scheduler.requests.get(self._rid), self._scheduler.step
        if self.submitted is None:
            if request is None or request is self._request:
                return False
            self._request = request
            if self._left:
                self._left -= 1
                return False
            self.submitted, self._num_before = step, request.num_output_tokens
        assert self._request is not None
        if self.first_token is None and self.num_tokens:
            self.first_token = step
        if request is not self._request:
            self.finished = step
        return self.finished is not None


def _gap(start: int, end: int | None) -> float | None:
    return None if end is None else end - start
