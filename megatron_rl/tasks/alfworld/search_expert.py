"""A demonstrator that knows what it has seen, where the planner knows everything: it looks into one place after another."""

from collections.abc import Sequence

from megatron_rl.tasks.alfworld.goals import Goal
from megatron_rl.tasks.alfworld.scene_prompts import View

APPLIANCES = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}


class Searcher:
    """Plays one game: what it gives is taken to be played. It reads the admissible commands alone, and remembers."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.thing, self.place = goal.thing.lower(), goal.place.lower()
        self.here = self.held = self.lamp = ""
        """Where it stands; what it holds; where it has seen the lamp."""
        self.looked_into: set[str] = set()
        self.is_changed = False

    def next(self, view: View) -> tuple[str, str] | None:
        """Thoughts, and a command; None where it knows no way: no place of the kind that it needs can be gone to."""
        try:
            return self._next(view.commands)
        except LookupError:
            return None

    def _next(self, commands: Sequence[str]) -> tuple[str, str]:
        if any(command.startswith(f"use {self.place} ") for command in commands):
            self.lamp = self.here
        if not self.held:
            return self._fetch(commands)
        if self.goal.kind == "look":
            return self._light(commands)
        if self.goal.kind in APPLIANCES and not self.is_changed:
            return self._change(commands)
        return self._put(commands)

    def _fetch(self, commands: Sequence[str]) -> tuple[str, str]:
        """What lies in a place where it shall be is left there."""
        for command in commands:
            if command.startswith(f"take {self.thing} ") and (self.goal.kind == "look" or _type(self.here) != self.place):
                self.held = command.removeprefix("take ").partition(" from ")[0]
                return f"Next: take {self.thing}.", command
        return f"Next: find {self.thing}.", self._look_on(commands)

    def _light(self, commands: Sequence[str]) -> tuple[str, str]:
        use = next((command for command in commands if command.startswith(f"use {self.place} ")), "")
        if use:
            return f"Next: use {self.place}.", use
        if self.lamp:
            return f"Next: use {self.place}.", self._go(self.lamp)
        return f"Next: find {self.place}.", self._look_on(commands)

    def _change(self, commands: Sequence[str]) -> tuple[str, str]:
        done = next((command for command in commands if command.startswith(f"{self.goal.kind} {self.held} with ")), "")
        self.is_changed = bool(done)
        return f"Next: {self.goal.kind} {self.thing}.", done or self._go(_first(commands, APPLIANCES[self.goal.kind]))

    def _put(self, commands: Sequence[str]) -> tuple[str, str]:
        thoughts = f"Next: put {self.thing} in {self.place}."
        if _type(self.here) != self.place:
            return thoughts, self._go(_first(commands, self.place))
        put = f"move {self.held} to {self.here}"
        if put not in commands:
            return thoughts, f"open {self.here}"
        self.held = ""
        return thoughts, put

    def _look_on(self, commands: Sequence[str]) -> str:
        """Open what is closed here, or go to the next place, those where nothing shall be put first; when all were seen, begin anew."""
        if f"open {self.here}" in commands and self.here not in self.looked_into:
            self.looked_into.add(self.here)
            return f"open {self.here}"
        self.looked_into.add(self.here)
        places = [command.removeprefix("go to ") for command in commands if command.startswith("go to ")]
        fresh = [place for place in places if place not in self.looked_into]
        if not fresh:
            self.looked_into, fresh = {self.here}, places
        return self._go(min(fresh, key=lambda place: _type(place) == self.place))

    def _go(self, place: str) -> str:
        self.here = place
        return f"go to {place}"


def _type(place: str) -> str:
    return place.partition(" ")[0]


def _first(commands: Sequence[str], kind: str) -> str:
    """The first place of a type that one can go to. LookupError: there is none."""
    places = [command.removeprefix("go to ") for command in commands if command.startswith(f"go to {kind} ")]
    return places[0]
