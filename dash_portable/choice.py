"""The outcome of choosing, with every decision and reason: its text and its JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass

from dash_portable.backends.spec import Backend, Decision, Forced
from dash_portable.errors import UnsupportedError
from dash_portable.platform.facts import Platform
from dash_portable.request import Request


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
        """The backend that attends; UnsupportedError with all reasons when there is none."""
        if self.backend is not None and self.layer is not None:
            return self.backend
        raise UnsupportedError(self.refusal(), self)

    def refusal(self) -> str:
        """Why nothing was chosen: request, platform, each backend's reasons, and the way out."""
        able = next((one.backend.name for one in self.decisions if one.ok), None)
        if self.forced is None:
            head, way_out = "no backend serves this request", "change what is asked or install one"
        else:
            head = f"backend {self.forced.name!r} cannot serve this request"
            way_out = f"{self.forced.undo} to let {able} run" if able else "no other backend can"
        return f"{head}\n{self}\n{way_out}"

    def __str__(self) -> str:
        lines = [f"request   {self.request}", f"platform  {self.platform}"]
        lines += [f"note      {note}" for note in self.platform.notes]
        width = max(len(one.backend.name) for one in self.decisions)
        for one in self.decisions:
            lines += _lines(one, width, self._mark(one))
        for stage in self.stages:
            lines.append(f"stage     {stage.name}: {self._runs(stage)}")
            for one in stage.decisions:
                lines += [f"      {one.backend.name} {reason}" for reason in one.rejections]
        return "\n".join(lines)

    def _runs(self, stage: Stage) -> str:
        if stage.backend is None:
            return "nobody"
        if self.forced is None or stage.backend.is_named(self.forced.name):
            return stage.backend.name
        return (
            f"{stage.backend.name} ({self.forced.name} attends, it has no {stage.name} of its own)"
        )

    def _mark(self, one: Decision) -> str:
        if self.forced and one.backend.is_named(self.forced.name):
            chosen = "chosen, " if one.backend is self.backend else ""
            return f" ({chosen}{self.chosen_by})"
        return " (chosen)" if one.backend is self.backend else ""

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


def _lines(one: Decision, width: int, mark: str) -> list[str]:
    answer = "ok" if one.ok else "rejected"
    remarks = "".join(f", {remark}" for remark in one.remarks)
    head = f"  {one.backend.name:{width}}  {answer}{mark}{remarks}"
    return [head, *(f"      {rejection}" for rejection in one.rejections)]
