"""The outcome of choosing, with every decision and reason: its text and its JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import TypeAlias

from dash_portable.backends.spec import Backend, Code, Decision, Forced, Rejection
from dash_portable.errors import DtypeError, UnsupportedError
from dash_portable.platform.facts import Platform
from dash_portable.request import Request

_WIDTH = 100  # of a line of names


# Reasons, and the rows that decline for them.
_Groups: TypeAlias = list[tuple[tuple[Rejection, ...], list[Backend]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Who runs one stage of the shared layer, and why not the others."""

    name: str
    decisions: tuple[Decision, ...]

    @property
    def backend(self) -> Backend | None:
        return next((one.backend for one in self.decisions if one.ok), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The outcome for one request: every backend's decision, best first, and the stages' own.

    backend   who attends; None when nobody can, or the forced one cannot
    """

    request: Request
    platform: Platform
    decisions: tuple[Decision, ...]
    stages: tuple[Stage, ...]
    backend: Backend | None
    forced: Forced | None = None

    @property
    def layer(self) -> Backend | None:
        """Who stores, selects, gathers and merges."""
        return self.stages[0].backend

    @property
    def chosen_by(self) -> str:
        return f"forced by {self.forced.source}" if self.forced else "chosen automatically"

    def required(self) -> Backend:
        """The backend that attends; UnsupportedError with all reasons when there is none, a
        DtypeError where the forced one has no such dtype anywhere."""
        if self.backend is not None and self.layer is not None:
            return self.backend
        offered = [
            one.backend.capability.dtypes for one in self.decisions if self._is_forced(one.backend)
        ]
        taken = any(dtypes is None or self.request.dtype in dtypes for dtypes in offered)
        kind = UnsupportedError if taken or not offered else DtypeError
        raise kind(self.refusal(), self)

    def refusal(self) -> str:
        """Why nothing was chosen: what is wrong with the forced one first, then request, platform,
        each backend's reasons, and the way out.
        """
        able = next((one.backend.name for one in self.decisions if one.ok), None)
        if self.forced is None:
            head, way_out = "no backend serves this request", "change what is asked or install one"
        else:
            head = f"backend {self.forced.name!r} cannot serve this request ({self.chosen_by})"
            way_out = f"{self.forced.undo} to let {able} run" if able else "no other backend can"
        groups = self.declined()
        own = [one for reasons, rows in groups if self._is_forced(rows[0]) for one in reasons]
        # A family has rows for other machines too: theirs only where there is nothing else to say.
        here = [one for one in own if one.code not in (Code.VENDOR, Code.ARCH)]
        said = dict.fromkeys(str(one) for one in here or own)
        head += f": {'; '.join(said)}" if said else ""
        return f"{head}\n{self}\n{way_out}"

    def declined(self) -> _Groups:
        """Who declines, together where the reasons are the same; the forced ones first."""
        groups: dict[tuple[bool, tuple[Rejection, ...]], list[Backend]] = {}
        for one in self.decisions:
            if not one.ok:
                key = (not self._is_forced(one.backend), one.rejections)
                groups.setdefault(key, []).append(one.backend)
        return [(key[1], groups[key]) for key in sorted(groups, key=lambda key: key[0])]

    def rejected(self) -> tuple[_Groups, _Groups]:
        """`declined` in two parts: the forced ones where nobody is chosen, since that is what was
        asked about, to be told before those that could serve; and the others.
        """
        groups = self.declined()
        if self.backend is not None:
            return [], groups
        own = [group for group in groups if self._is_forced(group[1][0])]
        return own, groups[len(own) :]

    def _is_forced(self, backend: Backend) -> bool:
        return self.forced is not None and backend.is_named(self.forced.name)

    def __str__(self) -> str:
        lines = [f"request   {self.request}", f"platform  {self.platform}"]
        lines += [f"note      {note}" for note in self.platform.notes]
        able = [one for one in self.decisions if one.ok]
        width = max((len(one.backend.name) for one in able), default=0)
        own, others = self.rejected()
        lines += self._told(own)
        for one in able:
            remarks = "".join(f", {remark}" for remark in one.remarks)
            lines.append(f"  {one.backend.name:{width}}  ok{self._mark(one.backend)}{remarks}")
        lines += self._told(others)
        for stage in self.stages:
            lines.append(f"stage     {stage.name}: {self._runs(stage)}")
            for one in stage.decisions:
                lines += [f"      {one.backend.name} {reason}" for reason in one.rejections]
        return "\n".join(lines)

    def _told(self, groups: _Groups) -> list[str]:
        lines = list[str]()
        for reasons, rows in groups:
            names = ", ".join(row.name for row in rows) + ": rejected"
            lines += textwrap.wrap(names, _WIDTH, initial_indent="  ", subsequent_indent="  ")
            lines[-1] += self._mark(rows[0])
            lines += [f"      {reason}" for reason in reasons]
        return lines

    def _runs(self, stage: Stage) -> str:
        if stage.backend is None:
            return "nobody"
        if self.forced is None or stage.backend.is_named(self.forced.name):
            return stage.backend.name
        return (
            f"{stage.backend.name} ({self.forced.name} attends, it has no {stage.name} of its own)"
        )

    def _mark(self, backend: Backend) -> str:
        if self._is_forced(backend):
            chosen = "chosen, " if backend is self.backend else ""
            return f" ({chosen}{self.chosen_by})"
        return " (chosen)" if backend is self.backend else ""

    def to_dict(self) -> dict[str, object]:
        return {
            "request": self.request.to_dict(),
            "platform": self.platform.to_dict(),
            "chosen": self.backend.name if self.backend else None,
            "chosen_by": self.chosen_by,
            "decisions": [one.to_dict() for one in self.decisions],
            "stages": {
                stage.name: {
                    "chosen": stage.backend.name if stage.backend else None,
                    "decisions": [one.to_dict() for one in stage.decisions],
                }
                for stage in self.stages
            },
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)
