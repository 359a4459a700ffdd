"""New games of ALFWorld, from what its package ships: rules (alfred.pddl), words (alfred.twl2), goals, and 120 floor plans.

Scenes are ALFWorld's: numbers 1 to 6 of each kind of room are held out, 7 to 30 are for training. Where a thing lies is drawn, and where a
receptacle stands whose coordinates are not shipped. Whether a game can be won is for the planner to say (textworld_engine.py).
"""

import importlib.util
import json
import random
import runpy
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rl.config import require
from megatron_rl.tasks.alfworld.goals import NAMES, Goal

APPLIANCES = {"clean": "SinkBasin", "heat": "Microwave", "cool": "Fridge"}
ABLE = {"clean": "Cleanable", "heat": "Heatable", "cool": "Coolable"}
LAMP = "DeskLamp"
UNDER_LAMP = ("Desk", "SideTable", "Dresser", "CoffeeTable", "Shelf")
"""What a desk lamp stands on."""
ROOMS = {1: "Kitchen", 201: "LivingRoom", 301: "Bedroom", 401: "Bathroom"}
MANGLED = str.maketrans({"|": "_bar_", "-": "_minus_", "+": "_plus_", ".": "_dot_", ",": "_comma_", " ": "_"})


@dataclass(slots=True, frozen=True)
class Draft:
    """A game that nobody has won yet."""

    goal: Goal
    task: str
    """In words."""
    problem: str
    """In PDDL."""


@dataclass(frozen=True)
class House:
    """What the package alfworld knows; `home` is where it lies. Nothing of it is imported: that would make a folder in the user's home."""

    home: Path

    @cached_property
    def constants(self) -> Mapping[str, Any]:
        return runpy.run_path(str(self.home / "gen" / "constants.py"))

    @cached_property
    def goals(self) -> Mapping[str, Mapping[str, Any]]:
        return runpy.run_path(str(self.home / "gen" / "goal_library.py"))["gdict"]

    @cached_property
    def holds(self) -> Mapping[str, Set[str]]:
        """Types of receptacles -> types of things that may lie there."""
        return self.constants["VAL_RECEPTACLE_OBJECTS"]

    @cached_property
    def fixed(self) -> Set[str]:
        """Types of receptacles that stay where they are."""
        return self.holds.keys() - self.constants["MOVABLE_RECEPTACLES_SET"]

    def scenes(self, split: str, kind: str) -> list[int]:
        """Numbers of the floor plans of a split in which there are tasks of the kind."""
        rooms = self.constants["GOALS_VALID"][NAMES[kind]]
        numbers = self.constants["TRAIN_SCENE_NUMBERS" if split == "train" else "TEST_SCENE_NUMBERS"]
        return [number for number in numbers if ROOMS[number - (number - 1) % 100] in rooms]

    def layout(self, scene: int, dice: random.Random) -> tuple[list[str], list[str]]:
        """A scene's receptacles, as Cabinet|+00.68|+00.50|-02.20, and the types of the things in it that can be carried, or switched on."""
        plans = self.home / "gen" / "layouts"
        receptacles = sorted(json.loads((plans / f"FloorPlan{scene}-openable.json").read_text()))
        types = sorted(json.loads((plans / f"FloorPlan{scene}-objects.json").read_text()))
        known = {type_of(receptacle) for receptacle in receptacles}
        places = [kind for kind in types if kind in self.fixed - known and not kind.endswith("Basin")]
        receptacles += [f"{kind}|{spot(dice)}" for kind in places]
        held = set().union(*(self.holds[type_of(receptacle)] for receptacle in receptacles))
        return receptacles, [kind for kind in types if kind in held | {LAMP}]

    @property
    def domain(self) -> str:
        return (self.home / "data" / "alfred.pddl").read_text()

    def grammar(self, task: str) -> str:
        return (self.home / "data" / "alfred.twl2").read_text().replace("UNKNOWN GOAL", task)


def house() -> House:
    """ValueError: the package is not installed."""
    spec = importlib.util.find_spec("alfworld")
    require(spec is not None, "alfworld", "missing", "games are made from its files; run: pip install --no-deps alfworld==0.4.2")
    return House(Path(spec.submodule_search_locations[0]))


def type_of(name: str) -> str:
    """Sink|+00.10|+00.89|-02.01|SinkBasin -> SinkBasin"""
    parts = name.split("|")
    return parts[4] if len(parts) == 5 else parts[0]


def spot(dice: random.Random) -> str:
    return "|".join(f"{dice.uniform(low, high):+06.2f}" for low, high in ((-3, 3), (0.5, 2), (-3, 3)))


def drafts(rules: House, *, split: str, kind: str, dice: random.Random, num_places: int, num_things: int) -> Iterator[Draft]:
    """Games of a kind in scenes of a split, without end. They have at most so many receptacles and things; 0 takes all of the scene."""
    scenes = rules.scenes(split, kind)
    while True:
        scene = dice.choice(scenes)
        receptacles, types = rules.layout(scene, dice)
        pairs = list(_pairs(rules, kind, receptacles, types))
        if not pairs:
            continue
        goal = Goal(kind, *dice.choice(pairs), scene)
        chosen = _chosen(rules, goal, receptacles, dice=dice, num=num_places)
        lying = _lying(rules, goal, chosen, types, dice=dice, num=num_things)
        words = dice.choice(rules.goals[NAMES[kind]]["templates"]).format(
            obj=goal.thing.lower(), recep=goal.place.lower(), toggle=goal.place.lower()
        )
        yield Draft(goal, words, _problem(rules, goal, chosen, lying))


def _pairs(rules: House, kind: str, receptacles: Sequence[str], types: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What can be done to which thing, and where it can go, or the lamp that it can be looked at with."""
    there = sorted({type_of(receptacle) for receptacle in receptacles})
    able = rules.constants["VAL_ACTION_OBJECTS"][ABLE[kind]] if kind in ABLE else types
    for thing in types:
        places = [place for place in there if thing in rules.holds[place] and place != APPLIANCES.get(kind)]
        if thing == LAMP or thing not in able or (kind in APPLIANCES and APPLIANCES[kind] not in there):
            continue
        if kind == "look" and places and LAMP in types and {*UNDER_LAMP} & {*there}:
            yield thing, LAMP
        elif kind != "look" and len(places) > 1:  # one where it lies, one where it goes
            yield from ((thing, place) for place in places)


def _chosen(rules: House, goal: Goal, receptacles: Sequence[str], *, dice: random.Random, num: int) -> list[str]:
    """The receptacles of a game: where the thing lies, where it goes, what is needed on the way; and others, as far as there is room."""
    shuffled = dice.sample(receptacles, len(receptacles))
    homes = {place for place in rules.fixed if goal.thing in rules.holds[place]} - {goal.place, APPLIANCES.get(goal.kind)}
    wanted = [homes, {*UNDER_LAMP} if goal.kind == "look" else {goal.place}]
    if goal.kind in APPLIANCES:
        wanted.append({APPLIANCES[goal.kind]})
    needed = [next(each for each in shuffled if type_of(each) in types) for types in wanted]
    chosen = [*dict.fromkeys(needed)]
    rest = [each for each in shuffled if each not in chosen]
    return chosen + rest[: max(num - len(chosen), 0) if num else None]


def _lying(
    rules: House, goal: Goal, chosen: Sequence[str], types: Sequence[str], *, dice: random.Random, num: int
) -> list[tuple[str, str]]:  # fmt: skip
    """Things and the receptacles that they lie in. None is where the goal wants it."""

    def homes(thing: str) -> list[str]:
        return [each for each in chosen if thing in rules.holds[type_of(each)] and (thing, type_of(each)) != (goal.thing, goal.place)]

    lying = [(goal.thing, dice.choice(homes(goal.thing))) for _ in range(2 if goal.kind == "two" else 1)]
    if goal.kind == "look":
        lying.append((LAMP, dice.choice([each for each in chosen if type_of(each) in UNDER_LAMP])))
    others = [thing for thing in types if thing not in (goal.thing, LAMP) for _ in range(dice.randint(1, 3))]
    dice.shuffle(others)
    lying += [(thing, dice.choice(homes(thing))) for thing in others if homes(thing)]
    return [(f"{thing}|{spot(dice)}", where) for thing, where in (lying[:num] if num else lying)]


def _problem(rules: House, goal: Goal, receptacles: Sequence[str], lying: Sequence[tuple[str, str]]) -> str:
    """The game in PDDL, as ALFWorld writes its own."""
    kinds = sorted({type_of(each) for each in receptacles})
    carried = sorted({type_of(thing) for thing, _ in lying})
    objects = ["agent1 - agent", *(f"loc_{number} - location" for number in range(len(receptacles) + 1))]
    objects += [f"{each.translate(MANGLED)} - receptacle" for each in receptacles]
    objects += [f"{thing.translate(MANGLED)} - object" for thing, _ in lying]
    objects += [*(f"{kind}Type - rtype" for kind in kinds), *(f"{kind}Type - otype" for kind in carried)]
    facts = ["(= (total-cost) 0)", "(atLocation agent1 loc_0)"]
    spots = {receptacle: f"loc_{number}" for number, receptacle in enumerate(receptacles, start=1)}
    for receptacle, location in spots.items():
        name = receptacle.translate(MANGLED)
        facts += [f"(receptacleType {name} {type_of(receptacle)}Type)", f"(receptacleAtLocation {name} {location})"]
        if type_of(receptacle) in rules.constants["OPENABLE_CLASS_SET"]:
            facts.append(f"(openable {name})")
    facts += [f"(canContain {kind}Type {thing}Type)" for kind in kinds for thing in carried if thing in rules.holds[kind]]
    for thing, where in lying:
        name, kind = thing.translate(MANGLED), type_of(thing)
        facts += [f"(objectType {name} {kind}Type)", f"(inReceptacle {name} {where.translate(MANGLED)})"]
        facts += [f"(objectAtLocation {name} {spots[where]})", f"({'toggleable' if kind == LAMP else 'pickupable'} {name})"]
        facts += [f"({able.lower()} {name})" for able in ABLE.values() if kind in rules.constants["VAL_ACTION_OBJECTS"][able]]
        if kind in rules.constants["MOVABLE_RECEPTACLES_SET"]:
            facts.append(f"(isReceptacleObject {name})")
    goals = rules.goals[NAMES[goal.kind]]["pddl"].format(obj=goal.thing, recep=goal.place, toggle=goal.place).replace("#", "-")
    lines = ["(define (problem made)", "(:domain alfred)", "(:objects", *objects, ")", "(:init", *facts, ")", goals]
    return "\n".join(lines)
