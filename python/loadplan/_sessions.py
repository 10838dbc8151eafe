"""One reload session per model, kept beside the model and not longer than it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ._library import classes
from ._modes import Mode, make_mode
from ._places import Places
from .targets import Model, Targets, as_targets

if TYPE_CHECKING:
    from .plan import LoadPlan

# Where the places of the targets of an atomic update lie on their model, which they lead to.
_PLACES = "_loadplan_places"


class Session:
    """The library's session of a model.  Holds the model weakly.

    A module has one session, whichever `Targets` stand for it: those of `start_reload` give the
    hooks and the loader of an update.
    """

    def __init__(self, owner: Any) -> None:
        self.handle: Any = classes.ReloadSession()
        self.mode: Mode = make_mode("direct")
        self._owner = weakref.ref(owner)
        self._started: weakref.ref[Any] | None = None
        self._known: LoadPlan | None = None
        self._begun: LoadPlan | None = None  # the plan of the active reload
        self.gpus: list[torch.device] = []  # of its targets, each once
        # Plans that gave destinations: an engine may write through them in any update.
        self._gave: weakref.WeakSet[LoadPlan] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread = 0  # which holds it
        self._call = ""

    def enter(self, call: str) -> None:
        """One step at a time.  A hook or a loader that runs in a step must not take another."""
        if self._thread == threading.get_ident():
            raise RuntimeError(
                f"`{call}` was called while `{self._call}` runs the hooks or the loader of this "
                "update; call it after that"
            )
        self._lock.acquire()
        self._thread, self._call = threading.get_ident(), call

    def leave(self) -> None:
        self._thread = 0
        self._lock.release()

    def start(self, model: Model, mode: Mode, *options: Any) -> None:
        self.handle.start(*options, [plan._handle for plan in self._gave])
        self.mode = mode
        self._started = weakref.ref(model)

    def keep_places(self, targets: Targets) -> None:
        """Of an atomic update, until it ends."""
        vars(self._owner())[_PLACES] = Places(targets)

    def finished(self) -> None:
        self._started = self._begun = None
        vars(self._owner()).pop(_PLACES, None)

    def settle(self) -> None:
        """After an error or an abort: where that ended the reload, the mode ends as well."""
        owner = self._owner()
        if self.state == "active" or owner is None:
            return
        self._begun = None
        started = self._started() if self._started is not None else None
        targets = as_targets(owner if started is None else started)
        places = vars(owner).get(_PLACES)
        self.finished()
        written = self.handle.may_have_written()
        if places is not None and not written:
            self.mode.abort(targets, "put back")
            places.put_back()
            return
        try:
            self.mode.abort(targets, "undefined" if written else "untouched")
        except Exception as error:
            self.hook_failed(str(error), targets)
        finally:
            self.handle.left_in_load_format(*self.mode.left(targets))

    def hook_failed(self, text: str, targets: Targets) -> None:
        known = self._known._handle if self._known is not None else None
        self.handle.hook_failed(text, *targets.lists(), known)

    def forget(self) -> None:
        """Every byte and layout is as before the reload: so is the session."""
        self.handle = classes.ReloadSession()
        self.mode = make_mode("direct")
        self.finished()

    @property
    def targets(self) -> Targets:
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the model of this reload no longer exists")
        if self._started is None:
            return as_targets(owner)
        started = self._started()
        if started is None:
            raise RuntimeError(
                "the `Targets` with which this reload was started no longer exist, nor do their "
                "hooks; keep them until it has ended"
            )
        return as_targets(started)

    @property
    def state(self) -> str:
        return str(self.handle.state())

    def know(self, plan: LoadPlan) -> None:
        """An engine that writes through destinations finishes without naming the plan again."""
        self._known = plan

    @property
    def known(self) -> LoadPlan | None:
        return self._known

    def gave_destinations(self, plan: LoadPlan) -> None:
        self._gave.add(plan)
        self.handle.hand_out(plan._handle)

    def begin_known(self) -> None:
        """For an update in which nothing named a plan: the last one is meant."""
        if self._known is not None and not self.handle.has_any_plan():
            self.begin(self._known)

    def begin(self, plan: LoadPlan) -> None:
        """Makes ``plan`` the plan of the active reload; refuses it before anything is written."""
        from .plan import LoadPlan, placement_of

        # What ends or fails the reload forgets it.
        if self._begun is plan:
            return
        if not isinstance(plan, LoadPlan):
            raise TypeError(
                f"the plan is {type(plan).__name__}; expected what `plan_loads` or `load_plan` "
                "returned"
            )
        targets = self.targets
        if self.state == "active" and (now := placement_of(targets)) != plan._placement:
            raise RuntimeError(
                f"the placement has changed since the plan was made: it was {plan._placement!r} "
                f"and is {now!r}; plan again"
            )
        plan._attributes.check()
        self.handle.begin(plan._handle, *self.mode.lists(targets, aliases=False))
        self._known = self._begun = plan
        self.gpus = list(dict.fromkeys(t.device for t in targets.named().values() if t.is_cuda))

    @property
    def begun(self) -> LoadPlan | None:
        return self._begun


_sessions: MutableMapping[Any, Session] = weakref.WeakKeyDictionary()


def session_of(model: Model, *, create: bool = False) -> Session:
    targets = model.targets if isinstance(model, Targets) else None
    owner = targets if isinstance(targets, nn.Module) else model
    session = _sessions.get(owner)
    if session is None:
        session = Session(owner)
        if create:
            session = _sessions.setdefault(owner, session)
    return session
