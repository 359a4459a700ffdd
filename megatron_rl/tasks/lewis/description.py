"""Parser for a speaker's description: thoughts, a phrase and a sentence, each in its own tags.

    <thinking>...</thinking><coarse>a photo of a red mug</coarse>
    <detailed>The mug is red, with ...</detailed>

Parts without complete tags are parsed as in the game's original service (Deepayan137/Lewis_Game
621d687). If a tag is not closed, its text ends at the next tag or, if there is no further tag, at
the end of the line. If there is no opening tag, the phrase is the first text of the form "a photo
of ...", and the sentence is the first sentence that begins with the category.
"""

import itertools
import re
from collections import Counter
from dataclasses import dataclass

from megatron_rl.rewards.text_quoting import quote_text

TAGS = ("thinking", "coarse", "detailed")
PROMPT = (
    "Describe the {category} in this picture so that somebody can pick it out among others of its kind. First think, between <thinking> "
    "and </thinking>. Then give, between <coarse> and </coarse>, a phrase of five or six words that begins with: a photo of. Then give, "
    "between <detailed> and </detailed>, one fluent sentence that names three or four visible attributes which tell it from others of its "
    "kind. Leave out the background and where it stands; of a person, leave out the clothes."
)
SITUATION_PROMPT = (
    "Last, give between <state> and </state> the state that it is in, and between <location> and </location> where it stands, neither of "
    "which is said in the sentence."
)
"""Text that is appended to PROMPT to ask for the object's state and location too, as in the
original game's longer prompt.
"""
QUESTION_TEMPLATE = "Does this description, {description}, describe the main subject of the image? Answer yes or no."
MAX_COARSE_CHARS, MAX_DETAILED_CHARS = 200, 1000
"""Maximum number of characters of the coarse part and of the detailed part in the listener's
question. Longer parts are truncated, so that the question never exceeds the listener's limit.
"""
_ANY_TAG = re.compile(r"</?(?:thinking|coarse|detailed|state|location)>", re.IGNORECASE)
_PHOTO_OF = re.compile(r"\b(?:an?\s+)?(?:photo|picture|image)\s+of\s[^.!?\n<]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
STOP_WORDS = frozenset(re.findall(
    r"\w+", "a an and are as at be by for from has have in is it its of on or that the there this to was were which with"
))  # fmt: skip


@dataclass(slots=True, frozen=True)
class Description:
    """Parts of a description; a missing part is empty."""

    thinking: str
    coarse: str
    detailed: str
    state: str = ""
    location: str = ""

    @property
    def question(self) -> str:
        """Question that the listener answers for each candidate.

        The question is an empty string if both the coarse and the detailed part are empty.
        """
        words = " ".join(part for part in (self.coarse[:MAX_COARSE_CHARS], self.detailed[:MAX_DETAILED_CHARS]) if part)
        return QUESTION_TEMPLATE.format(description=quote_text(words)) if words else ""


def parse_description(text: str, *, category: str) -> Description:
    """Parse a reply into a description. Parts that are not found are empty."""
    coarse = _text_in_tags(text, "coarse") or _first_match(_PHOTO_OF, text)
    detailed = _text_in_tags(text, "detailed") or _sentence_about(text, category)
    return Description(_text_in_tags(text, "thinking"), coarse, detailed, _text_in_tags(text, "state"), _text_in_tags(text, "location"))


def check_tag_pairs(text: str) -> list[bool]:
    """Return a bool for each tag in TAGS, True if the tag is opened once and then closed once."""
    return [text.count(f"<{tag}>") == 1 == text.count(f"</{tag}>") and text.index(f"<{tag}>") < text.index(f"</{tag}>") for tag in TAGS]


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences."""
    return [part.strip() for part in _SENTENCE_END.split(text.strip()) if part.strip()]


def rouge_2_f1(text: str, other: str) -> float:
    """Return the ROUGE-2 F1 score (Lin 2004) of two texts after removing stop words.

    Example: "red mug blue" has two bigrams and "red mug" has one. One bigram is shared, so the
    score is 2 * 1 / (2 + 1).
    """
    pairs, others = (Counter(itertools.pairwise(words)) for words in map(_content_words, (text, other)))
    total = pairs.total() + others.total()
    return 2 * (pairs & others).total() / total if total else 0.0


def _content_words(text: str) -> list[str]:
    return [word for word in re.findall(r"[^\W_]+", text.casefold()) if word not in STOP_WORDS]


def _text_in_tags(text: str, tag: str) -> str:
    opened = re.search(f"<{tag}>", text, re.IGNORECASE)
    if opened is None:
        return ""
    rest = text[opened.end() :]
    closed = re.search(f"</{tag}>", rest, re.IGNORECASE) or _ANY_TAG.search(rest)
    if closed is not None:
        return rest[: closed.start()].strip()
    return next((line.strip() for line in rest.splitlines() if line.strip()), "")


def _first_match(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[0].strip() if found else ""


def _sentence_about(text: str, category: str) -> str:
    begins = re.compile(rf"(?:(?:the|an?|this)\s+)?{re.escape(category)}\b", re.IGNORECASE)
    return next((each for each in split_sentences(_ANY_TAG.sub("\n", text)) if category and begins.match(each)), "")
