"""Re-running a recording: the core over the recorded inputs, without model or tokens.

A recording holds every input of the core: settings, submissions, aborts, the clock, how many tokens each step gave
whom, ends that the core could not know, refused allocations. `rerun` feeds them to a fresh scheduler; the events
that come out equal the recorded ones, byte for byte. What-if and fork start from here.
"""

from __future__ import annotations

from pagedinfer.config import EngineConfig
from pagedinfer.engine.plan import StepPlan, StepResult
from pagedinfer.engine.policy import Policy
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.errors import PagedInferError
from pagedinfer.memory.make import MakeMemory, make_allocator
from pagedinfer.trace import events as ev
from pagedinfer.trace.bus import EventBus
from pagedinfer.trace.recording import Recording, RecordingError

__all__ = ["rerun"]


def rerun(
    recording: Recording,
    *,
    until_step: int | None = None,
    policy: Policy | None = None,
    make_memory: MakeMemory = make_allocator,
) -> tuple[Scheduler, Recording]:
    """Run the core again over a recording's inputs, up to the end of step `until_step` (default: all).

    A recording made with a policy or memory of one's own needs an equal one here; those with names are in the config.

    Returns the scheduler in its last state and the new recording.

    Raises:
        RecordingError: the recording began mid-run or has a gap, so its inputs are not all there.
    """
    made = recording.info.get("fork")
    changed = isinstance(made, dict) and len(made) > 1 and made.get("step") != recording.first_step
    if changed or recording.info.get("imported_from"):
        raise RecordingError(
            "This recording was imported, or its settings changed midway, so its inputs do not give it again."
        )
    if any(isinstance(event, ev.Keyframe | ev.Gap) for event in recording.events) or not recording.events:
        raise RecordingError("Only a recording from the engine's first step, without gaps, can be re-run.")
    stop = len(recording.events)
    if until_step is not None:
        last = recording.step_events(until_step)
        stop = next(i for i, event in enumerate(recording.events) if event is last[-1]) + 1 if last else 1
    driver = Driver(recording.events[:stop], EngineConfig(**recording.config), policy, make_memory)
    return driver.scheduler, driver.run()


class Driver:
    """Feeds recorded inputs to a fresh scheduler, whose events go into `recording`.

    With `listens` False nobody hears the events, and they cost nothing.

    Attributes:
        events: what to feed. scheduler, bus: the core that is fed. open: its plans that are not closed yet.
    """

    def __init__(
        self,
        events: list[ev.Event],
        config: EngineConfig,
        policy: Policy | None,
        make_memory: MakeMemory = make_allocator,
        *,
        listens: bool = True,
    ) -> None:
        self.events = events
        self.recording = Recording()
        self.bus = EventBus()
        if listens:
            self.bus.subscribe(self.recording.add)
        self.scheduler = Scheduler(config, self.bus, policy, make_memory)
        self.scheduler.blocks.refuse_calls = {e.call for e in events if isinstance(e, ev.Refuse)}
        self.open: list[StepPlan] = []

    def run(self) -> Recording:
        for event in self.events:
            try:
                self.feed(event)
            except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
                raise RecordingError(
                    f"event {event.seq} ({event.kind}) does not fit what the core made of those before it: "
                    f"{type(error).__name__} {error}"
                ) from error
        return self.recording

    def feed(self, event: ev.Event) -> None:
        """Give one input to the core; decisions among the events are skipped, the core makes them again."""
        scheduler = self.scheduler
        match event:
            case ev.Meta():
                self.recording.add(event)
            case ev.Error() if event.where not in ("fit", "eviction") and not event.where.startswith(
                "policy."
            ):
                scheduler.bus.emit(_again(event))
            case ev.Fork():
                twin = scheduler.requests[event.parent].fork(event.rid)
                scheduler.fork(event.parent, twin, event.now)
            case ev.Reset():
                scheduler.reset_prefix_cache(event.why)
            case ev.Compact(why=why):
                scheduler.compact(scheduler.plan_compact(), why)
            case ev.Resize(num_blocks=num_blocks):
                scheduler.resize(num_blocks, scheduler.plan_resize(num_blocks))
            case ev.Submit() | ev.Reject():
                self.submit(event)
            case ev.Abort(rid=rid):
                scheduler.abort(rid, event.why)
            case ev.Step(now=now):
                self.open.append(scheduler.schedule(now))
            case ev.Commit():
                # token ids do not matter here, only how many there are
                result = StepResult({rid: (0,) * n for rid, n in event.tokens.items()})
                ends = {rid: (why, what) for rid, (why, what) in event.ends.items()}
                drafts = {rid: (0,) * n for rid, n in event.drafts.items()}
                scheduler.commit(self.open.pop(0), result, ends, drafts, event.keys)
            case ev.Cancel(why=why):
                scheduler.cancel(self.open.pop(), why)
            case ev.Preempt() if not self.open:
                scheduler.preempt(event.rid, event.why, event.mode)

    def submit(self, event: ev.Submit | ev.Reject) -> None:
        request = Request(event.rid, event.num_prompt_tokens, event.max_tokens, priority=event.priority)
        if isinstance(event, ev.Submit):
            request.key_ids, request.tenant, request.parent = event.keys, event.tenant, event.parent
            request.deadline, request.expires, request.retain = event.deadline, event.expires, event.retain
        try:
            self.scheduler.submit(request, event.now, getattr(event, "room_for", 1))
        except PagedInferError:
            if isinstance(event, ev.Submit):
                raise


def _again(event: ev.Error) -> ev.Error:
    return ev.Error(event.where, event.what)
