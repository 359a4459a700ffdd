"""Demonstrator that uses only its observations and searches one place after another.

Unlike this demonstrator, the planner (textworld_engine.py) knows the complete state of the game.
"""

from collections.abc import Sequence

from megatron_rl.tasks.alfworld.goals import AlfworldGoal
from megatron_rl.tasks.alfworld.scene_prompts import GameObservation

APPLIANCE_BY_KIND = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}


class SearchExpert:
    """Scripted policy that plays one game and reads only the admissible commands.

    The policy tracks its position from the commands that it returns, so the caller must run every
    returned command.
    """

    def __init__(self, goal: AlfworldGoal) -> None:
        self.goal = goal
        self.thing, self.place = goal.object_type.lower(), goal.receptacle_type.lower()
        self.position = self.held_object = self.lamp_position = ""
        """Current position, held object, and last known position of the lamp. A value that does not
        exist is an empty string.
        """
        self.searched_places: set[str] = set()
        self.is_changed = False

    def choose_command(self, observation: GameObservation) -> tuple[str, str] | None:
        """Return thoughts and a command, or None if no place of a required type is reachable."""
        try:
            return self._choose_command(observation.commands)
        except LookupError:
            return None

    def _choose_command(self, commands: Sequence[str]) -> tuple[str, str]:
        if any(command.startswith(f"use {self.place} ") for command in commands):
            self.lamp_position = self.position
        if not self.held_object:
            return self._fetch_object(commands)
        if self.goal.kind == "look":
            return self._use_lamp(commands)
        if self.goal.kind in APPLIANCE_BY_KIND and not self.is_changed:
            return self._change_object(commands)
        return self._put_object(commands)

    def _fetch_object(self, commands: Sequence[str]) -> tuple[str, str]:
        """Return a command that takes an object of the goal's type.

        If no such object can be taken, return a command that continues the search. Objects that are
        already in a target receptacle are not taken.
        """
        for command in commands:
            if command.startswith(f"take {self.thing} ") and (self.goal.kind == "look" or _place_type(self.position) != self.place):
                self.held_object = command.removeprefix("take ").partition(" from ")[0]
                return f"Next: take {self.thing}.", command
        return f"Next: find {self.thing}.", self._search_next_place(commands)

    def _use_lamp(self, commands: Sequence[str]) -> tuple[str, str]:
        use = next((command for command in commands if command.startswith(f"use {self.place} ")), "")
        if use:
            return f"Next: use {self.place}.", use
        if self.lamp_position:
            return f"Next: use {self.place}.", self._go_to(self.lamp_position)
        return f"Next: find {self.place}.", self._search_next_place(commands)

    def _change_object(self, commands: Sequence[str]) -> tuple[str, str]:
        done = next((command for command in commands if command.startswith(f"{self.goal.kind} {self.held_object} with ")), "")
        self.is_changed = bool(done)
        return f"Next: {self.goal.kind} {self.thing}.", done or self._go_to(_first_place(commands, APPLIANCE_BY_KIND[self.goal.kind]))

    def _put_object(self, commands: Sequence[str]) -> tuple[str, str]:
        thoughts = f"Next: put {self.thing} in {self.place}."
        if _place_type(self.position) != self.place:
            return thoughts, self._go_to(_first_place(commands, self.place))
        put = f"move {self.held_object} to {self.position}"
        if put not in commands:
            return thoughts, f"open {self.position}"
        self.held_object = ""
        return thoughts, put

    def _search_next_place(self, commands: Sequence[str]) -> str:
        """Return the command that continues the search.

        The command opens the current place if it is closed, and otherwise goes to a place that has
        not been searched yet. Target receptacles are searched last. After all places have been
        searched, the search starts over.
        """
        if f"open {self.position}" in commands and self.position not in self.searched_places:
            self.searched_places.add(self.position)
            return f"open {self.position}"
        self.searched_places.add(self.position)
        places = [command.removeprefix("go to ") for command in commands if command.startswith("go to ")]
        fresh = [place for place in places if place not in self.searched_places]
        if not fresh:
            self.searched_places, fresh = {self.position}, places
        return self._go_to(min(fresh, key=lambda place: _place_type(place) == self.place))

    def _go_to(self, place: str) -> str:
        self.position = place
        return f"go to {place}"


def _place_type(place: str) -> str:
    return place.partition(" ")[0]


def _first_place(commands: Sequence[str], kind: str) -> str:
    """Return the destination of the first `go to` command whose destination has type `kind`.

    Raises:
        LookupError: No command has a destination of this type.
    """
    places = [command.removeprefix("go to ") for command in commands if command.startswith(f"go to {kind} ")]
    return places[0]
