"""Settings of distillation from a teacher model.

The valid divergences are the keys of `DIVERGENCES` in algo/divergences.py.
"""

import math
from dataclasses import asdict, dataclass, field, fields

from megatron_rl.config.checks import require, require_address, require_choice
from megatron_rl.config.client import ClientSettings
from megatron_rl.config.merge import MergeSettings


@dataclass(kw_only=True, slots=True)
class TeacherServerSettings(ClientSettings):
    """Settings of a teacher that vLLM servers run (vllm serve MODEL --enable-scale-out)."""

    urls: list[str] = field(default_factory=list)
    """Addresses of servers of the same teacher, e.g. http://teacher:8000; each request goes to the
    least busy healthy server. Empty means no server."""
    urls_by_source: dict[str, list[str]] = field(default_factory=dict)
    """Addresses of the servers of several teachers, keyed by the data source of the examples. A
    source that is not listed uses distill.server.urls, and has no distillation term if that is
    empty or if its list is empty."""
    token_file: str = ""
    """File with the access token of the servers."""

    def __post_init__(self) -> None:
        self.check_client("distill.server")
        for source, urls in self.urls_by_source.items():
            for url in urls:
                require_address(f"distill.server.urls_by_source.{source}", url)
        remedy = "has no effect without distill.server.urls; set the addresses, or leave it out"
        require(self.is_used or not self.token_file, "distill.server.token_file", self.token_file, remedy)

    @property
    def is_used(self) -> bool:
        """True if a data source has servers."""
        return bool(self.urls) or any(self.urls_by_source.values())


@dataclass(kw_only=True, slots=True)
class DistillSettings:
    """Settings of distillation: the teacher, and its term in the loss or the reward."""

    teacher: str = ""
    """Hugging Face directory of the teacher, a model of the policy's family with the same
    tokenizer; its size may differ. Empty trains without a teacher. Combine a teacher with the
    rewards of any algorithm or with the demonstrations of stage=sft, or set algo=distill to learn
    from the teacher alone."""
    teachers: dict[str, str] = field(default_factory=dict)
    """Hugging Face directories of several teachers, keyed by the data source of the examples
    (data_source). A source that is not listed learns from distill.teacher, and has no distillation
    term if that is empty or if its directory is empty."""
    server: TeacherServerSettings = field(default_factory=TeacherServerSettings)
    """Servers of the teacher, in place of distill.teacher. They return the logprobs of sampled
    tokens and of the most probable tokens, so distill.support=full is not available."""
    merge: MergeSettings = field(default_factory=MergeSettings)
    """Merge of the policy's own checkpoints as the teacher, in place of distill.teacher."""
    privileged_prompt: str = ""
    """Text that only the teacher reads, at the end of the last message before the policy's first
    response. {question}, {answer} and other fields of the examples in braces are replaced. Without
    another teacher, the policy itself is the teacher, with its weights at the start of the step."""
    coef: float = 1.0
    """Coefficient of the distillation term; the policy gradient has coefficient 1."""
    final_coef: float = -1.0
    """Coefficient after distill.decay_steps steps; until then, the coefficient changes linearly. -1
    keeps distill.coef."""
    decay_steps: int = 0
    """Number of steps in which the coefficient changes from distill.coef to distill.final_coef."""
    apply_to: str = "loss"
    """Place of the term. loss: a divergence between policy and teacher at each sampled token is
    added to the loss. reward: coef * (teacher logprob - old logprob) is added to each sampled
    token's advantage, which is the policy gradient of the reverse KL divergence without credit for
    later tokens. responses: the teacher of distill.merge generates responses in the contexts of the
    policy's turns, and the negative log-likelihood of their thoughts is added to the loss."""
    response_fraction: float = 1.0
    """Fraction of the policy's turns in which the teacher generates a response with
    distill.apply_to=responses."""
    divergence: str = "reverse_kl"
    """Divergence in the loss: reverse_kl (KL(policy || teacher)), forward_kl (KL(teacher ||
    policy)) or jsd (generalized Jensen-Shannon divergence)."""
    support: str = "full"
    """Outcomes over which the divergence in the loss is summed. full: the whole vocabulary. top_k:
    the teacher's distill.top_k most probable tokens, and all other tokens as one outcome. sampled:
    an estimate from the sampled token alone."""
    top_k: int = 64
    """Number of the teacher's tokens with distill.support=top_k."""
    data_fraction: float = 0.0
    """Fraction of a step's samples that are demonstrations (task.data.demonstrations), on which the
    policy learns from the teacher alone. They are added to the rollouts of the step."""
    clip: float = 0.0
    """Upper limit of each outcome's term in the divergence; terms above it are constant, so that
    they have no gradient. 0 clips nothing."""
    jsd_beta: float = 0.5
    """Weight of the teacher in the mixture of distill.divergence=jsd; near 0, the gradient is that
    of forward_kl, and near 1, that of reverse_kl."""

    def __post_init__(self) -> None:
        require_choice("distill.apply_to", self.apply_to, ("loss", "reward", "responses"))
        remedy = "needs a teacher that the rollout engine can load; set distill.merge.method, or use loss or reward"
        require(self.merge.method != "" or not self.generates_responses, "distill.apply_to", self.apply_to, remedy)
        require_choice("distill.support", self.support, ("full", "top_k", "sampled"))
        require(0 < self.coef < math.inf, "distill.coef", self.coef, "must be a finite, positive number; without a teacher, leave it out")
        final = self.final_coef
        require(final == -1 or 0 <= final < math.inf, "distill.final_coef", final, "must be a finite, non-negative number, or -1")
        require(self.decay_steps >= 0, "distill.decay_steps", self.decay_steps, "must not be negative")
        remedy = "requires a distill.final_coef, and distill.final_coef requires distill.decay_steps"
        require((self.decay_steps > 0) == (final != -1), "distill.decay_steps", self.decay_steps, remedy)
        require(self.top_k >= 1, "distill.top_k", self.top_k, "must be at least 1")
        require(0 <= self.clip < math.inf, "distill.clip", self.clip, "must be a finite, positive number, or 0 to clip nothing")
        require(0 < self.jsd_beta < 1, "distill.jsd_beta", self.jsd_beta, "must be in (0, 1); forward_kl and reverse_kl are its limits")
        in_loss, remedy = self.apply_to == "loss", f"has no effect with distill.apply_to={self.apply_to}; leave it out"
        require(in_loss or self.divergence == "reverse_kl", "distill.divergence", self.divergence, remedy)
        require(in_loss or self.support == "full", "distill.support", self.support, remedy)
        require(in_loss or self.clip == 0, "distill.clip", self.clip, remedy)
        remedy = "clips the terms of a sum over outcomes, and distill.support=sampled has none; use full or top_k, or leave it out"
        require(self.support != "sampled" or self.clip == 0, "distill.clip", self.clip, remedy)
        remedy = "distill.support=sampled estimates reverse_kl and forward_kl; use full or top_k"
        require(self.support != "sampled" or self.divergence != "jsd", "distill.divergence", self.divergence, remedy)
        for key, default in UNUSED.items() if not self.has_teacher else ():
            value, remedy = asdict(self)[key], "has no effect without distill.teacher; name a model directory, or leave it out"
            require(value == default, f"distill.{key}", value, remedy)
        remedy = "is a second teacher next to distill.server.urls; leave one of them out"
        require(not (self.teacher and self.server.is_used), "distill.teacher", self.teacher, remedy)
        others = bool(self.server.is_used or self.merge.method)
        remedy = "are further teachers next to distill.server.urls or distill.merge.method; leave one of them out"
        require(not (self.teachers and others), "distill.teachers", self.teachers, remedy)
        require(not self.teachers or any(self.teachers.values()), "distill.teachers", self.teachers, "names no directory of a teacher")
        remedy = "needs more than servers return; use top_k or sampled, or distill.apply_to=reward"
        require(not (in_loss and self.server.is_used) or self.support != "full", "distill.support", self.support, remedy)
        method, remedy = self.merge.method, "is a second teacher next to distill.teacher or distill.server.urls; leave one of them out"
        require(not method or not (self.teacher or self.server.is_used), "distill.merge.method", method, remedy)

        self._check_responses()
        self._check_data_fraction()

    def _check_responses(self) -> None:
        fraction, key, generates = self.response_fraction, "distill.response_fraction", self.generates_responses
        require(0 < fraction <= 1, key, fraction, "must be in (0, 1]")
        remedy = "has no effect without distill.apply_to=responses; leave it out"
        require(generates or fraction == UNUSED["response_fraction"], key, fraction, remedy)
        text, remedy = self.privileged_prompt, "is not part of the contexts of distill.apply_to=responses; leave one of them out"
        require(not generates or not text, "distill.privileged_prompt", text, remedy)

    def _check_data_fraction(self) -> None:
        fraction, key, remedy = self.data_fraction, "distill.data_fraction", "must be in [0, 1); for demonstrations alone, use stage=sft"
        require(0 <= fraction < 1, key, fraction, remedy)
        refused = {
            "servers score only tokens that the policy samples; use distill.teacher": self.server.is_used,
            "demonstrations have no data source that names a teacher; use distill.teacher": bool(self.teachers),
            "demonstrations have no fields for distill.privileged_prompt; leave one of them out": bool(self.privileged_prompt),
            "distill.apply_to=reward needs tokens that the policy samples; use loss": self.apply_to == "reward",
            "distill.apply_to=responses has no divergence, their only term; use loss": self.generates_responses,
            "distill.support=sampled needs tokens that the policy samples; use full or top_k": self.support == "sampled",
        }
        for remedy, is_refused in refused.items():
            require(fraction == 0 or not is_refused, key, fraction, remedy)

    def count_demonstrations(self, num_rollouts: int) -> int:
        """Return the number of demonstrations that join the given number of rollouts in a step."""
        return round(self.data_fraction * num_rollouts / (1 - self.data_fraction))

    @property
    def has_teacher(self) -> bool:
        """True if the policy learns from a teacher, in this process or on servers."""
        return self.is_local or self.server.is_used or self.generates_responses

    @property
    def generates_responses(self) -> bool:
        """True if the rollout engine generates responses with the teacher's weights."""
        return self.apply_to == "responses"

    @property
    def is_local(self) -> bool:
        """True if a teacher in this process scores the tokens of sequences."""
        return bool(self.teacher_paths or self.merge.method or self.is_self) and not self.generates_responses

    @property
    def is_self(self) -> bool:
        """True if the policy is its own teacher, with a privileged prompt."""
        return bool(self.privileged_prompt) and not (self.teacher_paths or self.merge.method or self.server.is_used)

    @property
    def teacher_paths(self) -> list[str]:
        """Distinct directories of teachers."""
        return [path for path in dict.fromkeys([self.teacher, *self.teachers.values()]) if path]

    def teacher_key(self, path: str) -> str:
        """Return the setting that names a directory of `teacher_paths`, for error messages."""
        listed = (f"distill.teachers.{source}" for source, each in self.teachers.items() if each == path != self.teacher)
        return next(listed, "distill.teacher")

    def teacher_index(self, source: str) -> int:
        """Return the index of a data source's teacher in `teacher_paths`; -1 if it has none.

        The index is 0 for a merge of checkpoints and for a teacher on servers.
        """
        if self.server.urls_by_source:
            return 0 if self.server.urls_by_source.get(source, self.server.urls) else -1
        if not self.teachers:
            return 0
        path = self.teachers.get(source, self.teacher)
        return self.teacher_paths.index(path) if path else -1

    @property
    def listed_sources(self) -> list[str]:
        """Data sources that distill.teachers or distill.server.urls_by_source lists."""
        return [*self.teachers, *self.server.urls_by_source]

    @property
    def rewards_tokens(self) -> bool:
        """True if the teacher changes the advantages of tokens."""
        return self.has_teacher and self.apply_to == "reward"

    @property
    def has_divergence(self) -> bool:
        """True if the loss compares distributions over several outcomes with the teacher's."""
        return self.has_teacher and self.apply_to == "loss" and self.support != "sampled"


TEACHERS = ("teacher", "teachers", "server", "merge", "privileged_prompt")
"""Settings that name a teacher."""
UNUSED = {each.name: each.default for each in fields(DistillSettings) if each.name not in TEACHERS}
"""Default of every setting that has no effect without a teacher."""
