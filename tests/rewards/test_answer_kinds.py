"""Tests kinds of answers in which two different values were once equal: named values, units, dots,
numbered options, words next to numbers.

Tables are hand-made; generated pairs consist of values that are known exactly. All comparisons go
through the accuracy reward.
"""

import random
import time
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.answer_text import comparison_form, ends_in_dots
from megatron_rl.data.answers import find_answer_doubt
from megatron_rl.data.question_options import find_options
from megatron_rl.data.unit_symbols import mark_unit_case
from megatron_rl.rewards.answer import compare_by_rules, mean_relative_accuracy
from megatron_rl.rewards.equations import is_value_equation, read_named_values
from megatron_rl.rewards.number_words import keeps_value
from megatron_rl.rewards.numbers import parse_number
from tests.support.accuracy_rewards import compute_rewards

CHAIRS = "How many chairs are in this room? Answer with a number."
NUMBERED, LISTED = "Which animal? (1) cat (2) dog", "Which?\n1. cat\n2. dog\n3. cow"
SMALL, VALUES = "How many? (a) 3 (b) 1", "Which? (1) 3 (2) 1"
CAPITALS = "Which one?\nA. red\nB. green car\nC. blue"

EQUATIONS_SAME = [
    *[("x=1, y=2", "y=2, x=1"), ("x=1, y=2", "(x = 1.0, y = 2)"), ("x=1/2,y=2", "y=2; x=0.5"), ("x_1=1, x_2=2", "x_2=2, x_1=1")],
    *[("x=1,000", "1000"), ("x=1,000", "x=1000"), ("x=1,000", "1,000"), ("x=1,000, y=2", "y=2, x=1000"), ("x+1,000", "1000+x")],
    *[("x=5", "5"), ("AB=5", "5"), ("\\angle A=30", "30"), ("f(x)=2x", "2x"), ("P(A)=0.5", "1/2"), ("S_{10}=55", "55"), ("ab=6", "6")],
    *[("y=2x", "2x=y"), ("x+y=3", "3=x+y"), ("x=3 or x=4", "3, 4"), ("x=\\pm 3", "-3, 3"), ("x = 2+3 = 5", "5"), ("x=3, x=-3", "\\pm 3")],
]
EQUATIONS_DIFFERENT = [
    *[("x=1, y=2", "2, 1"), ("x=1, y=2", "1, 2"), ("x=1, y=2", "x=2, y=1"), ("x=1;y=2", "x=1;y=3"), ("x=1, y=2", "x=1")],
    ("x=1, x=2, y=3", "x=5, x=2, y=3"),
    *[
        ("x=1,000", "1,0"),
        ("x=1,000", "x=1"),
        ("x=1,000", "1"),
        ("x=5", "y=5"),
        ("x=1,y=2,z=3", "x=1,y=3,z=2"),
        ("\\alpha=1,\\beta=2", "2,1"),
    ],
    *[("x+y=3", "3"), ("|x|=5", "5"), ("x^2=9", "9"), ("\\sin x=1", "1"), ("2x=6", "6"), ("x=(1,2), y=3", "x=(2,1), y=3")],
    *[("(100,200)", "(200,100)"), ("(100,200)", "100200"), ("100,200", "200,100")],
]
UNITS_SAME = [
    *[("5 KM", "5 km"), ("5 Kg", "5 kg"), ("5 KG", "5 kg"), ("5 MM", "5 mm"), ("5 ML", "5 Ml"), ("5 mL", "5 ml"), ("5 MHz", "5 Mhz")],
    *[("5 MHz", "5 MHZ"), ("5 MPa", "5 MPA"), ("5 GB", "5 gb"), ("5 KB", "5 kB"), ("5 kw", "5 kW"), ("5 Pa", "5 pa"), ("5 L", "5 l")],
    *[("5 Meters", "5 meters"), ("5 PM", "5 pm"), ("5 MPH", "5 mph"), ("5 MIN", "5 min"), ("2nd", "2ND"), ("3D", "3d"), ("5B", "5b")],
    *[("5 PSI", "5 psi"), ("5 KWH", "5 kWh"), ("Mm", "mm"), ("5 Lb", "5 lb")],
]
UNITS_DIFFERENT = [
    *[("5 mmol", "5 Mmol"), ("3 mL", "3 ML"), ("3 ml", "3 Ml"), ("3 mPa", "3 Mpa"), ("3 pF", "3 PF"), ("5 mm", "5 Mm"), ("5 mg", "5 Mg")],
    *[
        ("5 Pa", "5 pA"),
        ("5 nm", "5 Nm"),
        ("5 mM", "5 mm"),
        ("5 S", "5 s"),
        ("5 T", "5 t"),
        ("5 h", "5 H"),
        *[("5 mM", "5 Mm"), ("5 pA", "5 PA"), ("5 mS", "5 Ms"), ("5 Ms", "5 MS"), ("5 mG", "5 Mg"), ("5 nm", "5 nM"), ("5 MT", "5 Mt")],
        ("5 ft", "5 fT"),
        ("5 MB", "5 Mb"),
    ],
    *[("5 mg/mL", "5 Mg/mL"), ("5 g/mL", "5 g/ML"), ("5 mm^2", "5 Mm^2"), ("5 m\u03a9", "5 M\u03a9"), ("5mV", "5MV"), ("5 Cal", "5 cal")],
    *[("5 mA h", "5 MA h"), ("2 per mL", "2 per ML"), ("5\\text{ mm}", "5\\text{ Mm}"), ("1.5 ms", "1.5 Ms"), ("5 mHz", "5 MHz")],
    *[("\\frac{1}{2} mW", "\\frac{1}{2} MW"), ("2\\pi mW", "2\\pi MW"), ("2\u03c0 mW", "2\u03c0 MW"), ("5\u00d710^3 mW", "5\u00d710^3 MW")],
]
DOTS_SAME = [("5", "5."), ("7:30", "7:30."), ("red", "red..."), ("5..", "5.."), ("1, 2", "2, 1."), ("5 cm", "5 cm.")]
DOTS_DIFFERENT = [
    ("5", "5.."),
    ("5", "5. ."),
    ("7:30", "7:30.."),
    ("1,2", "1,2.."),
    ("x=5", "x=5.."),
    ("0.333", "0.333..."),
    ("1/2", "1/2.."),
]
SCRIPTS_SAME = [("H2O", "H_{2}O"), ("x^{2}y", "x^2y"), ("CO2", "CO_2"), ("19:00:00", "7 pm"), ("1:30:00", "01:30:00")]
SCRIPTS_DIFFERENT = [("x^{12}", "x^{1}2"), ("a_{12}", "a_{1}2"), ("1:30:00", "1:30"), ("1:30:00", "1:30:01"), ("19:00:01", "7 pm")]
UNEVALUATED_SAME = [
    *[
        ("f(2)=4", "f(2)=4.0"),
        ("f(2)=4", "4"),
        ("f(x)=2x", "2x"),
        ("f(2)+f(3)=5", "5=f(3)+f(2)"),
        ("-L\\frac{dI}{dt}", "-\\frac{dI}{dt}L"),
        ("F=-\\frac{dU}{dx}", "-\\frac{dU}{dx}"),
        ("x^2=4", "4=x^2"),
    ],
    *[
        ("\\cos x=x", "x=\\cos x"),
        ("x \\in (-\\infty, 2]", "x \\in (-\\infty,2]"),
        ("x \\in [1,2]", "[1,2]"),
        ("\\vec{a}\\cdot\\vec{b}", "\\vec{b}\\cdot\\vec{a}"),
        ("\\emptyset", "∅"),
        ("2\\times 3x", "6x"),
        ("(1,2)\\cup(3,4)", "(3,4)\\cup(1,2)"),
    ],
]
UNEVALUATED_DIFFERENT = [
    *[
        ("f(2)=4", "f(2)=100"),
        ("P(0)=1", "P(1)=1"),
        ("T(3) = 15", "T(3) = 16"),
        ("a_1(2)=3", "a_1(2)=4"),
        ("f(2)+f(3)=5", "f(2)+f(3)=6"),
        ("x^2=-1", "x^2=-4"),
        ("x^2+y^2=-1", "x^2+y^2=-2"),
        ("e^x=0", "e^x=-1"),
        ("e^0=2", "e^0=3"),
        ("x=x+1", "y=y+1"),
        ("x=\\frac{1}{0}", "x=\\frac{2}{0}"),
        ("[1,1)", "[2,2)"),
        ("\\frac{dy}{dx}", "0"),
    ],
    *[
        ("\\frac{dy}{dx}", "\\frac{dx}{dy}"),
        ("\\frac{\\partial u}{\\partial x}", "0"),
        ("-L\\frac{dI}{dt}", "0"),
        ("F=-\\frac{dU}{dx}", "F=\\frac{dU}{dx}"),
        ("\\frac{dN}{dt}=kN", "\\frac{dN}{dt}=-kN"),
        ("\\frac{dy}{dx}=\\frac{dy}{dx}", "\\frac{du}{dx}=\\frac{du}{dx}"),
        ("2", "\\lim_{x\\to1}\\frac{x^2-1}{x-1}"),
        ("56", "\\sum_{k=1}^{10} k+1"),
        ("\\frac{x^2}{2}", "\\int x dx"),
        ("\\vec{a}\\cdot\\vec{b}", "\\vec{a}\\times\\vec{b}"),
        ("\\nabla\\cdot E", "\\nabla\\times E"),
        ("\\vec{a}\\times\\vec{b}", "\\vec{b}\\times\\vec{a}"),
        ("\\mathbf{a}\\times\\mathbf{b}", "\\mathbf{a}\\cdot\\mathbf{b}"),
        ("\\hat{i}\\times\\hat{j}", "\\hat{j}\\times\\hat{i}"),
    ],
]
MARKS_SAME = [
    *[("5%", "5"), ("5%", "0.05"), ("$5$", "5%")],
    *[("$90^\\circ$", "90°"), ("90 degrees", "90"), ("\\$5", "$5")],
]
MARKS_DIFFERENT = [
    *[("5%", "$5"), ("5%", "\\$5"), ("5 percent", "€5")],
    *[("90°", "90%"), ("90 degrees", "90 percent"), ("90^\\circ", "$90")],
]
GROUPS_SAME = [
    *[("0,100,200", "0, 100, 200"), ("0,100", "100,0")],
    *[("100,200,300", "100, 200, 300"), ("1,000", "1000")],
]
GROUPS_DIFFERENT = [
    *[("0,100,200", "100200"), ("0,100", "100")],
    *[("x=0,100", "x=100"), ("100200", "100, 200")],
]
OPTIONS_SAME = [
    *[("1", "cat", NUMBERED), ("2", "(2) dog", NUMBERED), ("2", "(2)", NUMBERED), ("2", "2) Dog.", NUMBERED), ("dog", "2", NUMBERED)],
    *[
        ("2", "dog", LISTED),
        ("cow", "3.", LISTED),
        ("2", "2. dog", LISTED),
        ("1, 2", "2, 1", NUMBERED),
        ("2", "\u72d7", "(1)\u732b(2)\u72d7"),
    ],
    *[("b", "1", SMALL), ("b", "(b)", SMALL), ("b", "B", SMALL), ("b", "(b) 1", SMALL), ("1", "b", SMALL), ("3", "a", SMALL)],
    *[("B", "b", CAPITALS), ("green car", "b", CAPITALS), ("3", "(1) 3", VALUES), ("1", "1", VALUES), ("a", "red", "a) red b) blue")],
]
OPTIONS_DIFFERENT = [
    *[("1", "dog", NUMBERED), ("2", "(1) cat", NUMBERED), ("2", "B", NUMBERED), ("2", "1, 2", NUMBERED), ("1", "1 or 2", NUMBERED)],
    *[
        ("b", "3", SMALL),
        ("b", "a", SMALL),
        ("b", "2", SMALL),
        ("1", "a", SMALL),
        ("2", "2 cats", NUMBERED),
        ("(2) dog", "(2) cat", NUMBERED),
    ],
    *[("1", "3", VALUES), ("3", "1", VALUES), ("1", "2", VALUES), ("2", "cow", LISTED)],
    *[("B", "B, B, B", CAPITALS), ("B", "(B) and (B)", CAPITALS), ("A, B", "A, B, B", CAPITALS), ("B", "B B", "")],
]


def unnoticed(cases: list[tuple[str, str, str]], expected: float) -> list[tuple[str, str, str]]:
    return [case for case, got in zip(cases, compute_rewards(cases), strict=True) if got != expected]


@pytest.mark.parametrize(
    ("same", "different"),
    [
        (EQUATIONS_SAME, EQUATIONS_DIFFERENT),
        (UNITS_SAME, UNITS_DIFFERENT),
        (DOTS_SAME, DOTS_DIFFERENT),
        (SCRIPTS_SAME, SCRIPTS_DIFFERENT),
        (UNEVALUATED_SAME, UNEVALUATED_DIFFERENT),
        (MARKS_SAME, MARKS_DIFFERENT),
        (GROUPS_SAME, GROUPS_DIFFERENT),
    ],
    ids=["equations", "units", "dots", "scripts and seconds", "unevaluated", "marks", "groups of digits"],
)
def test_kinds_of_answers(same: list[tuple[str, str]], different: list[tuple[str, str]]) -> None:
    """Pairs of one value are equal and pairs of two values are not, in both directions. Each text
    equals itself."""
    for pairs, expected in ((same, 1.0), (different, 0.0)):
        assert not unnoticed([(*pair, "") for one, other in pairs for pair in ((one, other), (other, one))], expected)
    assert not unnoticed([(text, text, "") for pair in (*same, *different) for text in pair], 1.0)


def test_options_of_numbers_and_small_letters() -> None:
    assert not unnoticed(OPTIONS_SAME, 1.0) and not unnoticed(OPTIONS_DIFFERENT, 0.0)
    assert find_options("Are (0, 1) and (3, 2) equal") == find_options("Find f(1) + f(2).") == find_options("(a), (b), x") == {}
    assert find_options("1) cat, 2) dog, or 3) cow") == {"1": "cat", "2": "dog", "3": "cow"}
    assert find_answer_doubt("2", NUMBERED) is None and find_answer_doubt("7", NUMBERED) is not None


RIGHT = [
    *[
        "The answer is 5.",
        "5 cm",
        "about 5 meters",
        "5 chairs",
        "There are 5 chairs in the picture",
        "I count 5 chairs in this room",
        "x = 5",
    ],
    *[
        "USD 5",
        "$5",
        "5 m/s",
        "5 square meters",
        "It is approximately 5 m",
        "5 km/h",
        "5\u00b0C",
        "Answer: 5",
        "**5**",
        "\\approx 5",
        "5 years old",
    ],
    *["5 cm^2", "5 minutes", "there are exactly 5", "5 people", "~5", "5 lbs"],
]
WRONG = [
    *[
        "5 degrees below zero",
        "a tenth of 5",
        "5 thousandths",
        "5 pairs",
        "anything but 5",
        "5..",
        "5 dozens",
        "half of 5",
        "5 hundred thousand",
    ],
    *[
        "5 or so",
        "5 grand",
        "5\u4e07",
        "5 tens",
        "5 couples",
        "all but 5",
        "5 short of ten",
        "minus the 5",
        "5 x",
        "5-fold",
        "5 under",
        "5 is wrong",
    ],
    *["the opposite of 5", "square of 5", "5 halves", "5 less than ten", "no fewer than 5", "ten times 5", "whichever exceeds 5"],
]


@pytest.mark.parametrize("question", ["", CHAIRS])
def test_words_beside_a_number(question: str) -> None:
    """For a numeric source, words next to a number are harmless or change its value, as decided by
    hand, with and without a question."""
    for answers, expected in ((RIGHT, 1.0), (WRONG, 0.0)):
        found = compute_rewards([("5", answer, question) for answer in answers], source="vsi_numerical")
        assert [answer for answer, got in zip(answers, found, strict=True) if got != expected] == []


def test_words_of_the_question_are_harmless_unless_they_change_a_value() -> None:
    """Words of the question may stand next to a number unless they change its value. Parts of its
    words may not."""
    asked = [("5", "The number of chairs is 5", CHAIRS), ("5", "5 tables", CHAIRS)]
    assert compute_rewards(asked, source="vsi_numerical") == [1.0, 0.0]
    assert mean_relative_accuracy("5", "5 tables", question=CHAIRS) == 0.0 == mean_relative_accuracy("5", "5 tables short", question=CHAIRS)
    assert (
        mean_relative_accuracy("5 boxes", "5 boxes or 5", question="") == 0.0 and mean_relative_accuracy("5 boxes", "just 5 boxes") == 1.0
    )
    assert mean_relative_accuracy("5", "half of 5", question="What is half of the chairs?") == 0.0
    assert [parse_number(f"5 {piece}", CHAIRS) for piece in ("chairs", "hair", "air", "man", "roo", "umber")] == [5, *[None] * 5]
    assert (
        parse_number("\u7ea65\u628a\u6905\u5b50", "\u6709\u591a\u5c11\u628a\u6905\u5b50") == 5
        and parse_number("5\u5343", "\u591a\u5c11\u5343\u514b") is None
    )


def test_an_equation_states_a_value_where_a_name_stands_alone_on_either_side() -> None:
    """Hand-decided cases. A chain states a value if its first or last side is a name, a list if
    each of its equations states one."""
    stating = ["y=2x", "2x=y", "5=x", "x=2+3=5", "5=2+3=x", "x=1, 2=y", "\\angle A=30", "30=\\angle A", "7"]
    others = ["x+y=3", "3=x+y", "2x=6", "6=2x", "x=1, x+y=3", "x^2=9", "5=2+x=3+2"]
    assert [text for text in [*stating, *others] if is_value_equation(text)] == stating


def test_words_of_a_reference_are_harmless_beside_those_of_the_question() -> None:
    """The word "boxes" is allowed only by the reference, because the question does not contain
    it."""
    found = [mean_relative_accuracy(truth, "just 5 boxes", question=CHAIRS) for truth in ("5 boxes", "5", "5 tables")]
    assert found == [1.0, 0.0, 0.0]


def test_values_by_name() -> None:
    """Each assignment of three values to three names equals itself in any order, and no other
    assignment."""
    values = ("1", "1/2", "-3")
    assignments = [dict(zip("xyz", order, strict=True)) for order in permutations(values)]
    dice = random.Random(0)

    def written(assignment: dict[str, str]) -> str:
        pairs = dice.sample(sorted(assignment.items()), 3)
        return dice.choice([", ", "; ", ","]).join(f"{name}{dice.choice(['=', ' = '])}{value}" for name, value in pairs)

    pairs = list(product(assignments, repeat=2))
    found = compute_rewards([(written(one), written(other), "") for one, other in pairs])
    assert found == [float(one == other) for one, other in pairs]


PREFIXES = {"m": -3, "M": 6, "p": -12, "P": 15, "k": 3, "n": -9, "G": 9, "T": 12, "": 0}


@settings(max_examples=200, deadline=None)
@given(
    *[st.sampled_from(sorted(PREFIXES))] * 2,
    st.sampled_from(["mol", "L", "Pa", "F", "V", "Hz", "J", "W", "eV", "\u03a9", "Bq", "N", "cd", "lx"]),
)
def test_prefixes_are_compared_by_their_power(one: str, other: str, unit: str) -> None:
    """Two units are equal exactly if the powers of ten of their prefixes are."""
    assert (comparison_form(f"5 {one}{unit}") == comparison_form(f"5{other}{unit}")) == (PREFIXES[one] == PREFIXES[other])
    assert mark_unit_case(f"in {one}{unit}") == f"in {one}{unit}", "a unit stands behind a number"


NOISE = ("the", "answer", "is", "about", "a", "cm", "chairs", ".", ",", "of")
CHANGES = ("half", "pairs", "not", "thousandths", "below", "ten", "x", "\u4e07")
WORDS = st.sampled_from(["5", "6", "-5", "5..", "5%", "=", *NOISE, *CHANGES])


@settings(max_examples=300, deadline=None)
@given(st.lists(WORDS, max_size=7), st.sampled_from(["", CHAIRS, "half of ten pairs"]))
def test_generated_words_never_make_another_number(words: list[str], question: str) -> None:
    """A text earns the reward of 5 only if it has one number and no word that changes a value. The
    number alone always earns it."""
    text = " ".join(words)
    score = mean_relative_accuracy("5", text, question=question)
    digits = [word for word in words if any(map(str.isdigit, word))]
    if score == 1.0:
        assert digits in (["5"], ["5%"]) and not {*CHANGES} & {*words} - ({"x"} if "x =" in text else set())
    assert mean_relative_accuracy("5", "5", question=question) == 1.0 and mean_relative_accuracy(text, text, question=question) in (
        0.0,
        1.0,
    )


@settings(max_examples=300, deadline=None)
@given(*[st.lists(st.sampled_from([*"xy=,;.12()ab mMpPLF", "1,000", "(1)", "a)", " and ", "Pa"]), max_size=10).map("".join)] * 2)
def test_generated_answers_are_decided_alike_in_both_directions(one: str, other: str) -> None:
    """Rules decide random pairs of answers alike in both directions."""
    assert compare_by_rules(one, other) is compare_by_rules(other, one)
    assert (compare_by_rules(one, one) is True) == (comparison_form(one) != "")
    assert not ends_in_dots(one) or compare_by_rules(one, "5") is not True
    assert not read_named_values(one) or is_value_equation(one)


def test_readers_of_kinds_are_linear() -> None:
    """Reading 20,000 repetitions of each piece takes less than 20 s in total; a quadratic reader
    would take far longer."""
    began = time.perf_counter()
    for piece in ("x=1,", "(1) ", "a) ", "5 m", "5 m/", "(", "5..", "5 .", "=", "mm ", "\u4e07", "pairs "):
        text = piece * 20_000
        (
            read_named_values(text[:200]),
            is_value_equation(text[:200]),
            find_options(text),
            mark_unit_case(text),
            ends_in_dots(text),
            keeps_value(text, text, text),
        )
    assert time.perf_counter() - began < 20
