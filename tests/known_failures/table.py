"""All known failures, by section and by the name that markers use."""

from tests.known_failures.failure import Failure
from tests.known_failures.inputs import DATA, TOKENS
from tests.known_failures.learning import ADVANTAGES, NUMERICS, REWARDS
from tests.known_failures.running import ENGINES, RUNS, TOOLS
from tests.known_failures.weights import WEIGHTS

SECTIONS: dict[str, dict[str, Failure]] = {
    "Tokens and images": TOKENS,
    "Data and transcripts": DATA,
    "Weights and converters": WEIGHTS,
    "Logprobs and numerics": NUMERICS,
    "Rewards and judges": REWARDS,
    "Advantages and losses": ADVANTAGES,
    "Rollouts and engines": ENGINES,
    "Tools and agents": TOOLS,
    "Runs and resumption": RUNS,
}
