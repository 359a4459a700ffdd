"""Plants mistakes, one at a time, in a copy of the tree, and says which test notices: for reviewers, and for whoever changes a test.

    python tests/mutants.py                 # every row of the table, minutes
    python tests/mutants.py clip schedule   # rows whose name holds one of these words
    python tests/mutants.py --list

Exit code 1: a mistake that no test noticed. tests/contracts/test_mutants.py keeps the table true to the code.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str
    """Text that stands once in the file."""
    new: str
    tests: str
    """What pytest is given: files of seconds, with -k where one test is meant."""


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a minus sign of Unicode is dropped",
        "megatron_rl/data/answer_text.py",
        "\\u2015\\u2212\\u2043",
        "\\u2015\\u2043",
        "tests/rewards/test_answer_forms.py -k numeric_sources",
    ),
    Mutant(
        "text is compared in the Unicode form that it has",
        "megatron_rl/data/answer_text.py",
        '_IGNORABLE.sub("", unicodedata.normalize("NFKC", text))',
        '_IGNORABLE.sub("", text)',
        "tests/rewards/test_answer_forms.py -k forms_of_one_answer",
    ),
    Mutant(
        "a number of Parquet loses its decimal form",
        "megatron_rl/data/answers.py",
        'return format(Decimal(str(narrow) if is_widened else repr(value)), "f")',
        "return repr(value)",
        "tests/data/test_data_answers.py -k decimal_form",
    ),
    Mutant(
        "a reference that no reply can match is accepted",
        "megatron_rl/data/answers.py",
        "if len(answer) >= LONGEST_ANSWER:",
        "if len(answer) > LONGEST_ANSWER:",
        "tests/data/test_data_answers.py -k no_reply_matches",
    ),
    Mutant(
        "a number behind two signs is one",
        "megatron_rl/rewards/numbers.py",
        'words[-1] in "+-\\xb1\\u2213" or ',
        "",
        "tests/rewards/test_answer_forms.py -k numeric_sources",
    ),
    Mutant(
        "a scale behind a number is a unit",
        "megatron_rl/rewards/numbers.py",
        "(_SCALES[scale[1].casefold()] if scale else 1)",
        "1",
        "tests/rewards/test_answer_forms.py -k numeric_sources",
    ),
    Mutant(
        "times are arithmetic",
        "megatron_rl/rewards/algebra.py",
        "or digit_label(text) or",
        "or",
        "tests/rewards/test_answer_forms.py -k forms_of_one_answer",
    ),
    Mutant(
        "small numbers are equal after rounding",
        "megatron_rl/rewards/algebra.py",
        "is_same and not _differ_by_a_share(read[0][0], read[1][0])",
        "is_same",
        "tests/rewards/test_algebra.py -k test_algebra",
    ),
    Mutant(
        "a pair of numbers in the other order is the same pair",
        "megatron_rl/rewards/numbers.py",
        "return wanted == given if len(kinds",
        "return sorted(wanted) == sorted(given) if len(kinds",
        "tests/rewards/test_answer_forms.py -k forms_of_one_answer",
    ),
    Mutant(
        "an option's text goes before its letter",
        "megatron_rl/rewards/multiple_choice.py",
        "if letter := choice(marked):",
        "if (letter := choice(marked)) and not options:",
        "tests/rewards/test_answer_forms.py -k options",
    ),
    Mutant(
        "a server resizes again what was enlarged",
        "megatron_rl/rollout/renderer.py",
        "return side**2, max(self.max_pixels, math.ceil(enlarged), ",
        "return side**2, max(self.max_pixels, ",
        "tests/rollout/test_renderer.py -k final_limits",
    ),
    Mutant(
        "a server resizes again what was made smaller than the least",
        "megatron_rl/rollout/renderer.py",
        "return side**2, max(self.max_pixels",
        "return self.min_pixels, max(self.max_pixels",
        "tests/rollout/test_renderer.py -k final_limits",
    ),
    Mutant(
        "frames of a video are counted from where the last one was read",
        "megatron_rl/tasks/visual_python/clip.py",
        "            self._next = number\n        while",
        "        while",
        "tests/e2e/test_video_task.py -k written",
    ),
    Mutant(
        "a video is shown in a task that has no code",
        "megatron_rl/tasks/visual_python/task.py",
        'videos=self.settings.protocol == "pyvision"',
        "videos=True",
        "tests/e2e/test_video_task.py -k only_code",
    ),
    Mutant(
        "the right option stays at its letter when options are shuffled",
        "megatron_rl/published/items.py",
        "LETTERS[order.index(LETTERS.index(item.answer))]",
        "item.answer",
        "tests/published/test_readers.py -k shuffled",
    ),
    Mutant(
        "directions count as three kinds of VSI-Bench",
        "megatron_rl/published/benchmarks.py",
        'mean_over("type", merged=DIRECTIONS)',
        'mean_over("type")',
        "tests/published/test_official.py -k kinds",
    ),
    Mutant(
        "intervals draw items that belong together one by one",
        "megatron_rl/published/figures.py",
        "cut = [by_unit(scored) for scored in samples]",
        "cut = [{str(number): [each] for number, each in enumerate(scored)} for scored in samples]",
        "tests/published/test_official.py -k interval",
    ),
    Mutant(
        "the words of an option are compared before a letter is a letter",
        "megatron_rl/rewards/answer_values.py",
        "if letter and letter.upper() in letters and (",
        "if letter and answer not in options and letter.upper() in letters and (",
        "tests/published/test_official_scripts.py -k before_it_is",
    ),
    Mutant(
        "VSI-Bench's thresholds are exact",
        "megatron_rl/rewards/official.py",
        "float(error) for error in 1 - np.linspace(0.5, 0.95, 10)",
        "float(error) + 1e-12 for error in 1 - np.linspace(0.5, 0.95, 10)",
        "tests/published/test_official_scripts.py -k own_arithmetic",
    ),
    Mutant(
        "a minus before a blank is no sign",
        "megatron_rl/rewards/answer_values.py",
        'return _LOOSE_SIGN.sub("-", ',
        "return (",
        "tests/published/test_official_scripts.py -k whole_or_not",
    ),
    Mutant(
        "a power is the number below it",
        "megatron_rl/rewards/answer_values.py",
        "return None if _CHANGED.search(text) else number(text)",
        "return number(text)",
        "tests/published/test_official_scripts.py -k whole_or_not",
    ),
    Mutant(
        "a jigsaw's first number loses its sign",
        "megatron_rl/rewards/answer_values.py",
        'before in "-+./:^"',
        'before in "./:^"',
        "tests/published/test_official_scripts.py -k test_tir_bench",
    ),
    Mutant(
        "DynaMath's truth may stand in a longer number",
        "megatron_rl/rewards/official.py",
        "return re.search(before + re.escape(truth) + after, answer) is not None",
        "return True",
        "tests/published/test_official_scripts.py -k dynamath_texts",
    ),
    Mutant(
        "DynaMath's choices are letters alone",
        "megatron_rl/rewards/official.py",
        "if given_letter else truth in answer[:3]",
        "if given_letter else False",
        "tests/published/test_official_scripts.py -k dynamath_choices",
    ),
    Mutant(
        "rows by number come as they stand",
        "megatron_rl/data/keyed_rows.py",
        "for key in sorted(found)",
        "for key in found",
        "tests/published/test_readers.py -k repository_has_it",
    ),
    Mutant(
        "a letter in the words begins an option",
        "megatron_rl/published/listed_options.py",
        "\\s*(?=[^\\s;\\uff1b])",
        "\\s*",
        "tests/published/test_listed_options.py -k we_math",
    ),
    Mutant(
        "options that name places in the picture are shuffled",
        "megatron_rl/published/items.py",
        "stay = not shuffle or any(",
        "stay = not shuffle or all(",
        "tests/published/test_listed_options.py -k name_places",
    ),
    Mutant(
        "a user's row may say what it is scored by",
        "megatron_rl/data/questions.py",
        '**({"official": record.official} if record.official else {}),',
        '**({"official": row["official"]} if "official" in row else {"official": record.official} if record.official else {}),',
        "tests/published/test_official.py -k scores_by",
    ),
    Mutant(
        "a layer is blamed for what is added to its output in place",
        "megatron_rl/explain/layers.py",
        "return value.detach().float().cpu().clone()",
        "return value.detach().float().cpu()",
        "tests/explain/test_explain.py -k trainer_does_is_named",
    ),
    Mutant(
        "pictures before the last token that agrees are suspected, and later ones are not",
        "megatron_rl/explain/suspects.py",
        "if last_right < place <= first + 1:",
        "if place <= last_right:",
        "tests/explain/test_explain.py -k second_is_found",
    ),
    Mutant(
        "the first suspect that holds is named, however loose the bound",
        "megatron_rl/explain/suspects.py",
        "if mean <= CLEARER * least)",
        "if name)",
        "tests/explain/test_bfloat16.py -k best_is_named",
    ),
    Mutant(
        "a token within the bound of bfloat16 proves that its pictures are right",
        "megatron_rl/explain/suspects.py",
        "if row < first and case.bound.is_of_each)",
        "if row < first)",
        "tests/explain/test_bfloat16.py -k rounded_numbers",
    ),
    Mutant(
        "a recorded picture need not have the pixels of its key",
        "megatron_rl/explain/checks.py",
        "elif found != key:",
        "elif not found:",
        "tests/explain/test_explain.py -k swapped_or_resized",
    ),
    Mutant(
        "a listener hears one way of saying yes",
        "megatron_rl/services/listener.py",
        "tokenizer.decode([number]).strip().casefold() == word",
        "tokenizer.decode([number]) == word",
        "tests/services/test_listener_walls.py -k every_way",
    ),
    Mutant(
        "the order of candidates is that of whoever asked first",
        "megatron_rl/rewards/listener.py",
        "return heard([logprobs[digest] for digest in shown])",
        "return heard(list(logprobs.values()))",
        "tests/rewards/test_listener_client.py -k order_of_candidates",
    ),
    Mutant(
        "another listener's numbers are taken",
        "megatron_rl/rewards/listener.py",
        "if answers.version != self.version:",
        "if not answers.version:",
        "tests/rewards/test_listener_client.py -k same_one",
    ),
    Mutant(
        "a wrong pick pays what a right one does",
        "megatron_rl/rewards/lewis.py",
        'if is_right or mode == "soft_always" else 0.0',
        "if mode else 0.0",
        "tests/rewards/test_lewis.py -k three_ways",
    ),
    Mutant(
        "a concept is in both splits",
        "tools/data/lewis_rounds.py",
        '("test", names[num:])',
        '("test", names[num - 1 :])',
        "tests/tools/test_make_lewis.py -k both_splits",
    ),
    Mutant(
        "rows name any picture of the disk",
        "megatron_rl/data/images.py",
        "if not any(real.startswith(",
        "if not real and any(real.startswith(",
        "tests/data/test_data_walls.py -k below_their_folder",
    ),
    Mutant(
        "a Parquet file may stand for anything",
        "megatron_rl/data/parquet_copy.py",
        "    limit(size, target.parent)\n",
        "",
        "tests/data/test_data_walls.py -k size_allows",
    ),
    Mutant(
        "a canceled job goes back into the queue",
        "megatron_rl/attempts.py",
        "if signal.SIGUSR1 not in heard and not _is_preempted(job):",
        "if not heard:",
        "tests/test_attempts.py -k goes_back",
    ),
    Mutant(
        "looking at a run folder takes its lock away",
        "megatron_rl/run_seen.py",
        "asked = _FLOCK.pack(fcntl.F_RDLCK",
        "asked = _FLOCK.pack(fcntl.F_UNLCK",
        "tests/test_run_seen.py -k holds",
    ),
    Mutant(
        "a refused command speaks for the run that it met",
        "megatron_rl/run_folder.py",
        "    if standing.refusal:\n",
        "    locks.push(partial(_leave_word, folder))\n    if standing.refusal:\n",
        "tests/test_run_seen.py -k word",
    ),
    Mutant(
        "an older word hides the newest attempt's",
        "megatron_rl/run_seen.py",
        "_, state, line = max(words)",
        "_, state, line = words[0]",
        "tests/test_run_seen.py -k newest",
    ),
    Mutant(
        "another key changes what is drawn",
        "megatron_rl/sweeps.py",
        "generators = {key: random.Random(f\"{given['seed']} {key}\") for key in keys}",
        "generators = dict.fromkeys(keys, random.Random(given['seed']))",
        "tests/test_sweeps.py -k repeat",
    ),
    Mutant(
        "a sweep begins before all of it is composed",
        "megatron_rl/cli/sweep.py",
        "        settings = all_composed(sweep.tasks)\n",
        "        settings = {task.index: all_composed([task])[0] for task in tasks}\n",
        "tests/cli/test_sweep.py -k composed",
    ),
    Mutant(
        "a sweep that was asked to stop begins the next run",
        "megatron_rl/cli/sweep.py",
        "while waiting and len(self._running) < at_once and not hearing.heard:",
        "while waiting and len(self._running) < at_once:",
        "tests/cli/test_sweep.py -k stopped",
    ),
    Mutant(
        "a finished run of a sweep begins again",
        "megatron_rl/cli/sweep.py",
        "if not stand.is_finished]",
        "if stand]",
        "tests/cli/test_sweep.py -k finished",
    ),
    Mutant(
        "the share of a household's goal is paid by its level alone",
        "megatron_rl/tasks/alfworld/task.py",
        'before = self.view.met if self.options.progress == "change" else 0',
        "before = 0",
        "tests/tasks/test_alfworld.py -k earns",
    ),
    Mutant(
        "cabinet 1 stands in cabinet 10",
        "megatron_rl/tasks/alfworld/replies.py",
        'if command in looked and re.search(rf"{re.escape(command)}(?!\\d)", looked, re.ASCII):',
        "if command in looked:",
        "tests/tasks/test_alfworld_parts.py -k reading",
    ),
    Mutant(
        "a player that failed plays the next episode",
        "megatron_rl/tasks/alfworld/pool.py",
        "if player.is_free and player.num_games < MAX_GAMES:",
        "if player.num_games < MAX_GAMES:",
        "tests/tasks/test_alfworld_players.py -k fails_one",
    ),
    Mutant(
        "scenes of training are held out too",
        "megatron_rl/tasks/alfworld/making.py",
        '"TRAIN_SCENE_NUMBERS" if split == "train" else "TEST_SCENE_NUMBERS"',
        '"TRAIN_SCENE_NUMBERS"',
        "tests/tools/test_make_alfworld.py -k drafts",
    ),
    Mutant(
        "turn baselines over all groups",
        "megatron_rl/algo/credit.py",
        "        groups[rollout.group].append(rollout)",
        "        groups[0].append(rollout)",
        "tests/algo/test_credit.py tests/algo/test_credit_turns.py",
    ),
    Mutant(
        "any library may load a wandb that nobody asked for",
        "megatron_rl/cli/door.py",
        "    if is_disabled or loaded is not None:",
        "    if loaded is not None:",
        "tests/cli/test_mistakes.py -k wandb_is_not_loaded",
    ),
    Mutant(
        "help forgets what a key means",
        "megatron_rl/cli/help.py",
        "            docs[node.target.id] = str(below.value.value)",
        "            pass",
        "tests/contracts/test_field_docs.py",
    ),
    Mutant(
        "a full bucket is thrown away",
        "megatron_rl/weights/stream.py",
        "            buckets.append(bucket)\n",
        "            pass\n",
        "tests/weights/test_stream.py",
    ),
    Mutant(
        "every schedule is constant",
        "megatron_rl/policy/optimizer.py",
        "lr_decay_style=settings.schedule",
        'lr_decay_style="constant"',
        "tests/policy/test_optimizer.py",
    ),
    Mutant(
        "every epoch in the same order",
        "megatron_rl/rollout/admission.py",
        "seed_of(seed, epoch, 1)",
        "seed_of(seed, 0, 1)",
        "tests/rollout/test_fleet.py",
    ),
    Mutant(
        "members of a group meet different worlds",
        "megatron_rl/rollout/episode.py",
        "env.reset(seed_of(settings.seed, group))",
        "env.reset(seed_of(settings.seed, group, sample))",
        "tests/rollout/test_fleet.py tests/rollout/test_episode.py",
    ),
    Mutant(
        "no clamp at the context's end",
        "megatron_rl/rollout/conversation.py",
        "max_tokens=min(sampling.max_tokens, room)",
        "max_tokens=sampling.max_tokens",
        "tests/rollout/test_conversation.py tests/rollout/test_fleet.py",
    ),
    Mutant(
        "tool errors count runs",
        "megatron_rl/step_metrics.py",
        "sum(bool(call.error) for call in calls)",
        "sum(call.ran for call in calls)",
        "tests/test_run.py",
    ),
    Mutant(
        "another lora.alpha is accepted",
        "megatron_rl/run_folder.py",
        '"run.max_failed", "run.patience_s"',
        '"run.max_failed", "lora.alpha", "run.patience_s"',
        "tests/test_run_folder.py",
    ),
    Mutant(
        "the copy of the reference is forgotten",
        "megatron_rl/plan/host.py",
        "references = int(",
        "references = 0 * int(",
        "tests/plan/test_memory.py",
    ),
    Mutant(
        "a stretch of a tensor ends with its row",
        "megatron_rl/policy/optimizer_state.py",
        "end = min(stop, (number + 1) * row)",
        "end = (number + 1) * row",
        "tests/policy/test_optimizer_state.py",
    ),
    Mutant(
        "the current weights are lost while the reference speaks",
        "megatron_rl/policy/offload.py",
        "there.copy_(aside)",
        "there.copy_(here)",
        "tests/policy/test_offload.py",
    ),
    Mutant(
        "the optimizer on the host has one thread",
        "megatron_rl/policy/optimizer.py",
        "torch.set_num_threads(max(before, ",
        "torch.set_num_threads(min(before, ",
        "tests/policy/test_offloaded_optimizer.py -k cores",
    ),
    Mutant(
        "AdamW's passing copy is forgotten",
        "megatron_rl/plan/memory.py",
        "max(passing.total, step)",
        "passing.total",
        "tests/plan/test_memory.py",
    ),
    Mutant(
        "a branch sees its parent and nobody before",
        "megatron_rl/policy/attention.py",
        "torch.cat([rows[prefix], own])",
        "torch.cat([torch.arange(*self.offset_S1[prefix : prefix + 2]), own])",
        "tests/policy/test_attention.py",
    ),
    Mutant(
        "what was sampled is shared",
        "megatron_rl/minibatches.py",
        "min(common(before, after), each.prompt_length)",
        "min(common(before, after), each.prompt_length + 1)",
        "tests/test_batch.py -k tree",
    ),
    Mutant(
        "another picture is shared",
        "megatron_rl/minibatches.py",
        "-1 - numbers.setdefault(key, len(numbers))",
        "-1",
        "tests/test_batch.py -k shared",
    ),
    Mutant(
        "a shared prompt is counted again",
        "megatron_rl/minibatches.py",
        "next=each.num_tokens - length",
        "next=each.num_tokens",
        "tests/test_batch.py",
    ),
    Mutant(
        "clips swapped",
        "megatron_rl/algo/surrogates.py",
        "    bounded_R = ratio_R.clamp(1.0 - algo.clip_low, 1.0 + algo.clip_high)\n    loss_R",
        "    bounded_R = ratio_R.clamp(1.0 - algo.clip_high, 1.0 + algo.clip_low)\n    loss_R",
        "tests/algo/test_surrogates.py tests/algo/test_objective.py",
    ),
    Mutant(
        "the estimator is ignored",
        "megatron_rl/algo/objective.py",
        "estimate = ESTIMATORS[algo.kl_estimator]",
        "estimate = k3",
        "tests/algo/test_objective.py",
    ),
    Mutant(
        "the policy is always at temperature 1",
        "megatron_rl/parts.py",
        "temperature=settings.algo.temperature if is_rl else 1.0",
        "temperature=1.0",
        "tests/test_parts.py",
    ),
    Mutant(
        "episodes are always at temperature 1",
        "megatron_rl/parts.py",
        "temperature=settings.algo.temperature, seed=settings.run.seed",
        "temperature=1.0, seed=settings.run.seed",
        "tests/test_parts.py",
    ),
    Mutant(
        "the schedule spans one step",
        "megatron_rl/parts.py",
        "optim=settings.optim, num_steps=num_steps",
        "optim=settings.optim, num_steps=1",
        "tests/test_parts.py",
    ),
    Mutant(
        "a failed episode is not tried again",
        "megatron_rl/rollout/fleet.py",
        "_TRIES = 3",
        "_TRIES = 1",
        "tests/rollout/test_fleet.py",
    ),
    Mutant(
        "maxima of updates are averaged",
        "megatron_rl/step_metrics.py",
        '_largest(each) if name.endswith("_max") else sum(each) / len(each)',
        "sum(each) / len(each)",
        "tests/test_run.py",
    ),
    Mutant(
        "a maximum drops NaN",
        "megatron_rl/policy/numbers.py",
        "maxima[name] = math.nan if math.isnan(value) or math.isnan(known) else max(known, value)",
        "maxima[name] = max(known, value)",
        "tests/policy/test_not_finite.py",
    ),
    Mutant(
        "NaN in a micro-batch is trained on",
        "megatron_rl/policy/numbers.py",
        "        if theirs:\n            raise NotFinite",
        "        if False:\n            raise NotFinite",
        "tests/policy/test_not_finite.py",
    ),
    Mutant(
        "broken weights are served",
        "megatron_rl/policy/network.py",
        "        if is_bad:\n",
        "        if False:\n",
        "tests/policy/test_not_finite.py",
    ),
    Mutant(
        "the rate ignores the step",
        "megatron_rl/policy/network.py",
        "self.schedule.num_steps = step + 1",
        "self.schedule.num_steps = 1",
        "tests/policy/test_optimizer.py",
    ),
    Mutant(
        "own rates decay norms",
        "megatron_rl/policy/optimizer.py",
        "overrides = get_standard_config_overrides(config) | {",
        "overrides = {",
        "tests/policy/test_optimizer.py",
    ),
    Mutant(
        "the sum's deviation of the group",
        "megatron_rl/algo/credit.py",
        "_divided(turns, scale, algo)",
        "_divided(turns, 1.0, algo)",
        "tests/algo/test_credit_turns.py tests/algo/test_credit.py",
    ),
    Mutant(
        "equal states of different turns are two",
        "megatron_rl/algo/credit.py",
        "begun[turn.state].append(",
        'begun[f"{turn.state} {number}"].append(',
        "tests/algo/test_credit_states.py",
    ),
    Mutant(
        "turns without a state are compared",
        "megatron_rl/algo/credit.py",
        "            if turn.state:\n",
        "            if True:\n",
        "tests/algo/test_credit_states.py",
    ),
    Mutant(
        "every turn earns the outcome",
        "megatron_rl/algo/credit.py",
        "(outcome if number == len(rollout.turns) else 0.0)",
        "outcome",
        "tests/algo/test_credit_states.py",
    ),
    Mutant(
        "a mean's share by count",
        "megatron_rl/rewards/rubric.py",
        "values.append(total / max(count, 1) if mean else total)",
        "values.append(total / len(steps) if mean else total)",
        "tests/rewards/test_rubric.py",
    ),
    Mutant(
        "a reply without an action stands",
        "megatron_rl/tasks/gym_cards/blackjack_table.py",
        "(1 - hits - gone, stood), (gone, LOST), *after",
        "(1 - hits, stood), *after",
        "tests/tasks/test_card_evaluations.py",
    ),
    Mutant(
        "digits of another script end a number",
        "megatron_rl/tasks/gym_cards/replies.py",
        'r"\\w+|[^\\w\\s]"',
        'r"[0-9]+|[a-z]+|[^\\w\\s]"',
        "tests/tasks/test_replies.py",
    ),
    Mutant(
        "evaluations concatenate",
        "megatron_rl/tasks/gym_cards/points_task.py",
        "self.eval_rules = replace(rules, target",
        "self.eval_rules = replace(self.rules, target",
        "tests/tasks/test_card_evaluations.py",
    ),
    Mutant(
        "None is a step worth 0",
        "megatron_rl/algo/credit.py",
        "            if turn.score is not None:\n                steps[number].append((index, turn.score))",
        "            steps[number].append((index, turn.score or 0.0))",
        "tests/algo/test_credit_turns.py tests/algo/test_credit_gradients.py",
    ),
    Mutant(
        "the last turns of the longest learn nothing",
        "megatron_rl/algo/credit.py",
        "        if len(reached) == 1:\n            continue\n",
        "",
        "tests/algo/test_credit_turns.py",
    ),
    Mutant(
        "selection looks at rewards alone",
        "megatron_rl/algo/credit.py",
        '        if algo.turns == "broadcast":\n            values',
        "        if True:\n            values",
        "tests/algo/test_select.py tests/algo/test_credit_turns.py",
    ),
    Mutant(
        "k3 has no bound",
        "megatron_rl/algo/kl.py",
        "return (difference_R.expm1() - difference_R).clamp(max=MAX_K3)",
        "return difference_R.expm1() - difference_R",
        "tests/algo/test_kl.py",
    ),
    Mutant(
        "the correction touches the KL",
        "megatron_rl/algo/objective.py",
        "loss_R = loss_R + algo.kl_coef * estimate(",
        "loss_R = loss_R + correction_R * algo.kl_coef * estimate(",
        "tests/algo/test_objective.py tests/algo/test_corrections.py",
    ),
    Mutant(
        "the correction has no cap",
        "megatron_rl/algo/corrections.py",
        "_log_r(rows).exp().clamp(max=algo.correction_cap)",
        "_log_r(rows).exp()",
        "tests/algo/test_corrections.py",
    ),
    Mutant(
        "a band mask truncates",
        "megatron_rl/algo/corrections.py",
        "ratio_R * _within(ratio_R, algo.token_mask_low, algo.token_mask_high)",
        "ratio_R.clamp(algo.token_mask_low, algo.token_mask_high)",
        "tests/algo/test_corrections.py -k by_hand",
    ),
    Mutant(
        "the geometric mean is a product",
        "megatron_rl/algo/corrections.py",
        "_within(_mean(_log_r(rows), rows, algo).exp(), algo.geo_mask_low",
        "_within(_product(rows, algo), algo.geo_mask_low",
        "tests/algo/test_corrections.py -k by_hand",
    ),
    Mutant(
        "a correction's sequence is always a context",
        "megatron_rl/algo/corrections.py",
        'rows.turn_R if algo.correction_over == "turns" else rows.context_R',
        "rows.context_R",
        "tests/algo/test_corrections.py -k turn",
    ),
    Mutant(
        "opsm masks good sequences too",
        "megatron_rl/algo/corrections.py",
        "(rows.advantage_R >= 0) | (drift_R <= algo.opsm_delta)",
        "(drift_R <= algo.opsm_delta)",
        "tests/algo/test_corrections.py -k opsm",
    ),
    Mutant(
        "opsm looks at the old logprobs",
        "megatron_rl/algo/corrections.py",
        "_held(rows.engine_R - rows.logprob_R)",
        "_held(rows.engine_R - rows.old_R)",
        "tests/algo/test_corrections.py -k opsm",
    ),
    Mutant(
        "log r is not held",
        "megatron_rl/algo/corrections.py",
        "x_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)",
        "x_R",
        "tests/algo/test_corrections.py -k float32",
    ),
    Mutant(
        "weights have a gradient",
        "megatron_rl/algo/corrections.py",
        "@torch.no_grad()\ndef correct(",
        "def correct(",
        "tests/algo/test_corrections.py",
    ),
    Mutant(
        "the importance ratio counts twice",
        "megatron_rl/algo/corrections.py",
        "require(len(ratios) <= 1,",
        "require(len(ratios) <= 2,",
        "tests/algo/test_algorithms.py -k together",
    ),
    Mutant(
        "with bypass the surrogate compares with the old logprobs",
        "megatron_rl/algo/objective.py",
        "replace(rows, old_R=rows.engine_R) if is_bypass else rows",
        "rows",
        "tests/algo/test_corrections.py tests/test_corrected_step.py",
    ),
    Mutant(
        "with bypass the engine is compared with itself",
        "megatron_rl/algo/objective.py",
        "gap_R = (rows.old_R - rows.engine_R).abs()",
        "gap_R = (compared.old_R - rows.engine_R).abs()",
        "tests/algo/test_corrections.py -k metrics",
    ),
    Mutant(
        "with bypass old logprobs are read all the same",
        "megatron_rl/algo/algorithms.py",
        " and not bypasses(algo)",
        "",
        "tests/test_train.py -k read_once",
    ),
    Mutant(
        "the effective sample size is of the mean weight alone",
        "megatron_rl/step_metrics.py",
        "mean**2 / square if",
        "mean / square if",
        "tests/test_run.py -k one_line",
    ),
    Mutant(
        "a sequence is a token",
        "megatron_rl/algo/surrogates.py",
        "(mean_R + _scaled(",
        "(log_ratio(rows).detach() + _scaled(",
        "tests/algo/test_surrogates.py",
    ),
    Mutant(
        "CISPO's clipped tokens lose their gradient",
        "megatron_rl/algo/surrogates.py",
        "1.0 + algo.clip_high).detach()\n    return -weight_R * rows.advantage_R * _scaled(rows.logprob_R, rows)",
        "1.0 + algo.clip_high)\n    return -weight_R * rows.advantage_R",
        "tests/algo/test_surrogates.py",
    ),
    Mutant(
        "whitening over dropped rollouts too",
        "megatron_rl/algo/credit.py",
        "trained = [rollout for rollout in scored if rollout.is_trained_on]",
        "trained = scored",
        "tests/algo/test_credit.py",
    ),
    Mutant(
        "OPO without lengths",
        "megatron_rl/algo/credit.py",
        "[rollout.num_sampled for rollout in members]",
        "[1 for rollout in members]",
        "tests/algo/test_credit.py",
    ),
    Mutant(
        "RLOO is GRPO",
        "megatron_rl/algo/credit.py",
        "value * len(members) / max(len(members) - 1, 1)",
        "value",
        "tests/algo/test_credit.py",
    ),
    Mutant(
        "what is read back is a token late",
        "megatron_rl/batch.py",
        "enumerate(values[first:last], origin.start + 1)",
        "enumerate(values[first:last], origin.start)",
        "tests/test_batch.py",
    ),
    Mutant(
        "advantages taken from the context's start",
        "megatron_rl/batch.py",
        "slice(origin.start + 1, origin.start + 1 + last - first)",
        "slice(1, 1 + last - first)",
        "tests/test_batch.py",
    ),
    Mutant(
        "a context that others leave is several",
        "megatron_rl/batch.py",
        "context_R=batch.context_T[rows_R]",
        "context_R=torch.searchsorted(batch.cu_seqlens_S1[1:], rows_R.int(), right=True)",
        "tests/test_batch.py -k tree",
    ),
    Mutant(
        "dropped rollouts are packed",
        "megatron_rl/minibatches.py",
        "if rollout.is_trained_on and rollout.num_sampled",
        "if rollout.is_scored and rollout.num_sampled",
        "tests/test_batch.py",
    ),
    Mutant(
        "idle contexts take their share along",
        "megatron_rl/minibatches.py",
        "denominator=moving[0].denominator + spare",
        "denominator=moving[0].denominator",
        "tests/test_batch.py",
    ),
    Mutant(
        "the KL penalty is added",
        "megatron_rl/algo/credit.py",
        "return rollout.reward - penalty(rollout, algo)",
        "return rollout.reward + penalty(rollout, algo)",
        "tests/algo/test_credit.py tests/test_train.py",
    ),
    Mutant(
        "the reference is of the current weights",
        "megatron_rl/train.py",
        'partial(policy.logprobs, weights="reference")',
        'partial(policy.logprobs, weights="current")',
        "tests/test_train.py tests/golden/test_recorded.py",
    ),
    Mutant(
        "a token's next value is its own",
        "megatron_rl/algo/gae.py",
        "        next_value = value\n",
        "        next_value = 0.0\n",
        "tests/algo/test_gae.py",
    ),
    Mutant(
        "the outcome is earned by the first turn",
        "megatron_rl/algo/credit.py",
        "number == len(rollout.turns)",
        "number == 1",
        "tests/algo/test_gae.py",
    ),
    Mutant(
        "the critic learns whitened returns",
        "megatron_rl/algo/gae.py",
        "= advantage + action.value",
        "= credit + action.value",
        "tests/algo/test_gae.py",
    ),
    Mutant(
        "a turn's value counts as one token's",
        "megatron_rl/algo/value.py",
        "return segment_sum(rows.weight_R, rows.turn_R) * is_first_R",
        "return rows.weight_R * is_first_R",
        "tests/algo/test_value.py",
    ),
    Mutant(
        "a clipped value is the better one",
        "megatron_rl/algo/value.py",
        "torch.maximum(error_R",
        "torch.minimum(error_R",
        "tests/algo/test_value.py",
    ),
    Mutant(
        "a head's warm-up moves the trunk",
        "megatron_rl/policy/policy.py",
        "hidden_RH.detach() + 0.0 * hidden_RH if head_alone",
        "hidden_RH if head_alone",
        "tests/parity/test_critic.py",
    ),
    Mutant(
        "values stay in the head's units",
        "megatron_rl/policy/learner.py",
        "return head.to_returns(head(hidden_RH))",
        "return head(hidden_RH)",
        "tests/parity/test_critic.py",
    ),
    Mutant(
        "turns of a context are one",
        "megatron_rl/batch.py",
        "(rows_R.diff(prepend=rows_R.new_full((1,), -2)) != 1)",
        "(rows_R.diff(prepend=rows_R.new_full((1,), -2)) > 99)",
        "tests/test_batch.py",
    ),
    Mutant(
        "thoughts count in full",
        "megatron_rl/algo/thoughts.py",
        "= [coef] * (turn.action - start)",
        "= [1.0] * (turn.action - start)",
        "tests/algo/test_value.py",
    ),
    Mutant(
        "AdamW counts the head's warm-up as the trunk's",
        "megatron_rl/train.py",
        "                policy.restart_optimizer()",
        "                pass",
        "tests/test_train_loop.py",
    ),
    Mutant(
        "the loss keeps the first weight of the KL",
        "megatron_rl/train.py",
        "updates_of(now, policy",
        "updates_of(settings, policy",
        "tests/test_train_loop.py",
    ),
    Mutant(
        "the reward keeps the first weight of the KL",
        "megatron_rl/train.py",
        "credited(rollouts, now, policy",
        "credited(rollouts, settings, policy",
        "tests/test_train_loop.py",
    ),
    Mutant(
        "the weight of the KL follows the head's warm-up",
        "megatron_rl/train.py",
        " and step >= settings.critic.warmup_steps:  # before",
        ":  # before",
        "tests/test_train_loop.py",
    ),
    Mutant(
        "a KL far off its target changes its weight without bound",
        "megatron_rl/algo/kl.py",
        "min(max(kl / target - 1.0, -MAX_ERROR), MAX_ERROR)",
        "kl / target - 1.0",
        "tests/algo/test_kl.py",
    ),
    Mutant(
        "the policy learns while its critic warms up",
        "megatron_rl/train.py",
        "metrics = {} if warms_up else policy.update(",
        "metrics = policy.update(",
        "tests/test_train.py",
    ),
    Mutant(
        "versions are lost",
        "megatron_rl/rollout/conversation.py",
        ", versions=completion.versions)",
        ")",
        "tests/rollout/test_conversation.py tests/rollout/test_fleet.py tests/rollout/test_episode.py",
    ),
    Mutant(
        "the event loop waits for pictures",
        "megatron_rl/rollout/conversation.py",
        "return act() if pixels < renderer.small_pixels else await renderer.aside(act)",
        "return act()",
        "tests/rollout/test_local.py",
    ),
    Mutant(
        "an engine that fails takes all that is left",
        "megatron_rl/rollout/dealing.py",
        "return min(num, self.share - num_groups) if has_failed else num",
        "return num",
        "tests/rollout/test_dealing.py",
    ),
    Mutant(
        "groups of rounds share numbers",
        "megatron_rl/rollout/admission.py",
        "self._next += len(new)",
        "self._next += 0",
        "tests/rollout/test_fleet.py",
    ),
    Mutant(
        "the sampler does not move on",
        "megatron_rl/rollout/admission.py",
        "            self.rounds += 1\n",
        "",
        "tests/rollout/test_fleet.py",
    ),
    Mutant(
        "what is too old is trained on",
        "megatron_rl/rollout/admission.py",
        "oldest[group] < limit]",
        "oldest[group] < limit - 1]",
        "tests/rollout/test_staleness.py",
    ),
    Mutant(
        "no step waits for what the next one could not train on",
        "megatron_rl/rollout/table.py",
        " and self.due_reached >= len(self.due)",
        "",
        "tests/rollout/test_staleness.py",
    ),
    Mutant(
        "what is due is played and left for the next step",
        "megatron_rl/rollout/fleet.py",
        "sorted(played, key=lambda group: group not in due)[:num]",
        "played[:num]",
        "tests/rollout/test_staleness.py",
    ),
    Mutant(
        "a later look at a token is taken for the first",
        "megatron_rl/noted.py",
        "        whose = tuple(batch.origin_S)\n",
        "        whose = id(batch)\n",
        "tests/test_noted.py",
    ),
    Mutant(
        "the size that a box is measured in is that of what was shown",
        "megatron_rl/observe/viewer/static/episode.js",
        "[width, height] = frame || [",
        "[width, height] = [",
        "tests/observe/test_viewer.py",
    ),
    Mutant(
        "what was dealt is lost with its run",
        "megatron_rl/train.py",
        ", dealt=fleet.admission.not_trained_on)",
        ")",
        "tests/test_stale_run.py",
    ),
    Mutant(
        "an event loop's clock goes on while it stands",
        "megatron_rl/rollout/loop.py",
        "self._stood_s += self.time() - self._left",
        "pass",
        "tests/rollout/test_staleness.py",
    ),
    Mutant(
        "the gap is that of older weights' tokens too",
        "megatron_rl/train.py",
        '(take(rollouts, each, "versions") == step) & each.mask_T',
        "each.mask_T",
        "tests/test_train.py",
    ),
    Mutant(
        "pictures of old weights are served",
        "megatron_rl/rollout/vllm/core.py",
        "        self._engine.reset_encoder_cache()\n",
        "",
        "tests/parity/test_engine_versions.py",
    ),
    Mutant(
        "a server is called by its new weights before it has forgotten the pictures of the old ones",
        "megatron_rl/rollout/sender.py",
        """        self.server.call("/reset_encoder_cache", {}, timeout_s=LOAD_S)
        self.server.call("/finish_weight_update", {"weight_version": label}, timeout_s=LOAD_S)
""",
        """        self.server.call("/finish_weight_update", {"weight_version": label}, timeout_s=LOAD_S)
        self.server.call("/reset_encoder_cache", {}, timeout_s=LOAD_S)
""",
        "tests/rollout/test_sender.py",
    ),
    Mutant(
        "a server is let in by what it calls its weights alone",
        "megatron_rl/rollout/lookout.py",
        "            if does:\n",
        "            if does or not server.is_in:\n",
        "tests/rollout/test_lookout.py -k samples_nothing",
    ),
    Mutant(
        "an update waits for a server that does not answer",
        "megatron_rl/rollout/remote.py",
        "if server.is_in or server.answers]",
        "if server.url]",
        "tests/rollout/test_lookout.py -k no_update",
    ),
    Mutant(
        "a busy server is taken for one that hangs",
        "megatron_rl/rollout/lookout.py",
        "return before != await self._moved(server)",
        "return False",
        "tests/rollout/test_lookout.py -k busy",
    ),
    Mutant(
        "a server that hangs is left beside the one that takes its place",
        "megatron_rl/services/engines.py",
        "        engine.kept.kill()\n",
        "",
        "tests/services/test_engines.py -k hangs",
    ),
    Mutant(
        "a server is started again for ever",
        "megatron_rl/services/engines.py",
        "engine.kept is None and engine.ends <= RESTARTS and",
        "engine.kept is None and",
        "tests/services/test_engines.py -k rests_grow",
    ),
    Mutant(
        "servers compute on the GPUs of the ranks",
        "megatron_rl/config/rollout.py",
        "firsts = [num_ranks + number * self.tp",
        "firsts = [number * self.tp",
        "tests/services/test_engines.py -k behind",
    ),
    Mutant(
        "a busy server is asked",
        "megatron_rl/servers.py",
        "min(rested",
        "max(rested",
        "tests/test_servers.py",
    ),
    Mutant(
        "an endpoint's words are lost",
        "megatron_rl/evaluation/endpoint.py",
        'return ended_at(choice.message.content or "", sampling.stop)',
        'return ""',
        "tests/evaluation/test_endpoint.py -k counted",
    ),
    Mutant(
        "an endpoint forgets what it said",
        "megatron_rl/evaluation/endpoint.py",
        'self._messages.append({"role": "assistant", "content": text})',
        "pass",
        "tests/evaluation/test_endpoint.py -k conversation",
    ),
    Mutant(
        "a replay reads the first share of a step's rollouts on every rank",
        "megatron_rl/recorded/replay.py",
        "mine = range(self._rank * num // self._size, (self._rank + 1) * num // self._size)",
        "mine = range(0, num // self._size)",
        "tests/e2e/test_resume.py -k trained_on_again",
    ),
    Mutant(
        "the page over runs answers to any host's name",
        "megatron_rl/observe/viewer/server.py",
        "allowed_hosts=hosts)",
        'allowed_hosts=["*"])',
        "tests/observe/test_viewer.py -k refused",
    ),
    Mutant(
        "what makes room takes pictures that others show",
        "megatron_rl/observe/bank.py",
        "for key in gone.keys - others - self._keys_of_lines():",
        "for key in gone.keys:",
        "tests/observe/test_bank.py",
    ),
    Mutant(
        "a transcript holds a reply that was cut off",
        "megatron_rl/recorded/conversations.py",
        "last - first >= cut_at and",
        "last - first > cut_at and",
        "tests/recorded/test_export.py -k cut_off",
    ),
    Mutant(
        "a reply that is masked is learned",
        "megatron_rl/rollout/renderer.py",
        "logprobs=[0.0] * len(reply) if piece.is_learned else None",
        "logprobs=[0.0] * len(reply)",
        "tests/rollout/test_transcript_labels.py -k masked",
    ),
    Mutant(
        "the length of a transcript counts a picture's placeholder beside its tokens",
        "megatron_rl/rollout/renderer.py",
        "return num_text - len(sizes) + ",
        "return num_text + ",
        "tests/rollout/test_transcript_labels.py -k measured",
    ),
    Mutant(
        "a flag of a message is not read",
        "megatron_rl/data/transcript_messages.py",
        "return all(flags.values()) if flags else default",
        "return default",
        "tests/data/test_data_transcript_forms.py",
    ),
    Mutant(
        "a key of unknown meaning that is False is taken for an empty one",
        "megatron_rl/data/transcript_messages.py",
        'return value in ("", "[]", "{}", [], {})',
        'return value in ("", "[]", "{}", [], {}, False)',
        "tests/data/test_data_transcript_refusals.py -k unknown",
    ),
    Mutant(
        "replies in a prompt of TRL's are learned",
        "megatron_rl/data/transcript_forms.py",
        'read_messages(record, "prompt", is_learned=False)',
        'read_messages(record, "prompt")',
        "tests/data/test_data_transcript_forms.py -k prompt",
    ),
    Mutant(
        "a picture that is there is taken for the name of a source",
        "megatron_rl/data/media_columns.py",
        " and not os.path.isfile(folder / value)",
        "",
        "tests/data/test_data_transcript_refusals.py -k there",
    ),
    Mutant(
        "a reply may show a picture",
        "megatron_rl/data/transcript_parts.py",
        '        _check_role(record, role, f"{field} ({PLACE})")',
        "        str(field)",
        "tests/data/test_data_transcript_refusals.py -k reply",
    ),
    Mutant(
        "pictures without a place stand in the line of the first words",
        "megatron_rl/data/transcript_parts.py",
        '"text": "\\n" + str(first["text"])}',
        '"text": str(first["text"])}',
        "tests/data/test_data_transcript_forms.py -k place",
    ),
    Mutant(
        "what had failed is scored",
        "megatron_rl/recorded/rescore.py",
        "if not rollout.is_scored:",
        "if rollout.dropped:",
        "tests/recorded/test_rescore.py -k rule",
    ),
    Mutant(
        "a token's reward on the board leaves the outcome out",
        "megatron_rl/recorded/board.py",
        "rewards[-1] += rollout.outcome",
        "rewards[-1] += 0.0",
        "tests/recorded/test_board.py",
    ),
    Mutant(
        "every chunk of an evaluation has the first one's seeds",
        "megatron_rl/evaluation/alone.py",
        "settings=episode, first_group=first)",
        "settings=episode, first_group=0)",
        "tests/evaluation/test_alone.py",
    ),
    Mutant(
        "an evaluation goes on with other weights",
        "megatron_rl/evaluation/folder.py",
        "if weights == fingerprint(settings)",
        "if weights",
        "tests/evaluation/test_alone.py",
    ),
    Mutant(
        "an interval takes episodes of an example for independent",
        "megatron_rl/evaluation/report.py",
        "[sum(each) / len(each) for each in solved]",
        "[value for each in solved for value in each]",
        "tests/evaluation/test_statistics.py",
    ),
)


def planted(mutant: Mutant, tree: Path) -> str:
    """The first test that fails with the mistake in place, or '' where none does."""
    path = tree / mutant.file
    sound = path.read_text()
    path.write_text(sound.replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-W", "ignore", "-p", "no:cacheprovider", *mutant.tests.split(" ")]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=600, check=False)
    path.write_text(sound)
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, flags=re.MULTILINE)
    assert found or result.returncode == 0, f"{mutant.name}: pytest ended with {result.returncode}\n{result.stdout[-2000:]}"
    return found[1] if found else ""


def copied(to: Path) -> None:
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="plant the rows whose name holds one of these; all without any")
    parser.add_argument("--list", action="store_true", help="print the table and plant nothing")
    asked = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not asked.words or any(word in mutant.name for word in asked.words)]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        if not asked.list:
            copied(Path(folder))
        for number, mutant in enumerate(chosen, 1):
            print(f"[{number}/{len(chosen)}] {mutant.name} ({mutant.file})", end="" if not asked.list else "\n", flush=True)
            if asked.list:
                continue
            began = time.monotonic()
            noticed = planted(mutant, Path(folder))
            survivors += not noticed
            print(f": {noticed or 'SURVIVED ' + mutant.tests} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen)} mistakes, {survivors} unnoticed" if not asked.list else f"{len(chosen)} mistakes")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
