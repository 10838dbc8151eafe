"""One reload session per model, kept beside the model and not longer than it."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from ._library import classes
from ._modes import Mode, make_mode
from ._places import Places
from .targets import Model, Targets, as_targets

if TYPE_CHECKING:
    from .plan import LoadPlan


class Session:
    """The library's session of a model.  Holds the model weakly."""

    def __init__(self, model: Model) -> None:
        self.handle: Any = classes.ReloadSession()
        self.mode: Mode = make_mode("direct")
        # Of an atomic update that is active; None in any other state.
        self.places: Places | None = None
        self._model = weakref.ref(model)
        self._known: LoadPlan | None = None
        # Plans that gave destinations: an engine may write through them in any update.
        self._gave: weakref.WeakSet[LoadPlan] = weakref.WeakSet()

    def settle(self) -> None:
        """After an error or an abort: where that ended the reload, the mode ends as well."""
        if self.state == "active":
            return
        places, self.places = self.places, None
        targets = self.targets
        written = self.handle.may_have_written()
        if places is not None and not written:
            self.mode.abort(targets, "put back")
            places.put_back(targets)
            return
        try:
            self.mode.abort(targets, "undefined" if written else "untouched")
        except Exception as error:
            self.handle.hook_failed(str(error), *targets.lists())

    @property
    def targets(self) -> Targets:
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this reload no longer exists")
        return as_targets(model)

    @property
    def state(self) -> str:
        return str(self.handle.state())

    def know(self, plan: LoadPlan) -> None:
        """An engine that writes through destinations finishes without naming the plan again."""
        self._known = plan

    def gave_destinations(self, plan: LoadPlan) -> None:
        self._gave.add(plan)
        self.handle.hand_out(plan._handle)

    def destinations(self) -> list[Any]:
        return [plan._handle for plan in self._gave]

    @property
    def known(self) -> LoadPlan | None:
        return self._known

    def begin_known(self) -> None:
        """For an update in which nothing named a plan: the last one is meant."""
        if self._known is not None and not self.handle.has_any_plan():
            self.begin(self._known)

    def begin(self, plan: LoadPlan) -> None:
        """Makes ``plan`` the plan of the active reload; refuses it before anything is written."""
        from .plan import placement_of

        if self.handle.has_plan(plan._handle):
            return
        targets = self.targets
        if self.state == "active" and (now := placement_of(targets)) != plan._placement:
            raise RuntimeError(
                f"the placement has changed since the plan was made: it was {plan._placement!r} "
                f"and is {now!r}; plan again"
            )
        self.handle.begin(plan._handle, *self.mode.lists(targets))
        self._known = plan


_sessions: MutableMapping[Any, Session] = weakref.WeakKeyDictionary()


def session_of(model: Model, *, create: bool = False) -> Session:
    session = _sessions.get(model)
    if session is None:
        session = Session(model)
        if create:
            _sessions[model] = session
    return session
