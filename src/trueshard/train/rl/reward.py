"""The user's reward functions, as training calls them.

``Rewards`` checks them before a model is built, scores samples, and plays episodes: conversations of the model with a
generator function. Functions run in processes of their own, with a time limit a call; what they may return is checked,
and an error names the function, the record, the sample and the line. Rewards depend on the samples alone, not on the
number of processes or on which of them is ready first.

``reward_functions`` has the forms of functions, ``reward_worker`` the program of a process, ``reward_processes`` the
processes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueshard.errors import UserError
from trueshard.train.rl.config import RewardSection
from trueshard.train.rl.reward_functions import LISTS, Function, Wrong, form_of, rewards_of
from trueshard.train.rl.reward_processes import Answer, Call, Processes
from trueshard.train.rl.samples import Name, Prompt, Sample

CHECKED = 3
"""Records that ``check`` tries the functions on."""


@dataclass(frozen=True)
class Reward:
    """The reward of a sample."""

    reward: float
    """Sum over the functions of weight × reward; 0.0 if one was too slow."""
    parts: dict[str, float] = field(default_factory=dict)
    """Other numbers that the function returned. With several functions each one's reward under its name, and
    "name.part" for its parts."""
    slow: bool = False
    """True if a call took longer than `reward.seconds`."""


Messages = list[dict[str, Any]]
Turn = Messages | Reward
"""Next turn of an episode: messages, after which it waits for the model's answer, or its end, a reward."""


@dataclass
class _Episode:
    record: Mapping[str, Any]
    about: str
    """The sample, in words."""
    place: int
    """Number of the process."""
    answers: list[str] = field(default_factory=list)


class Rewards:
    """Reward functions in processes of their own, which start when they are first needed.

    Args:
        section: the configuration, `[reward]`.
    """

    def __init__(self, section: RewardSection) -> None:
        self._functions, self._seconds = section.functions, section.seconds
        self._weights = section.weights or [1.0] * len(self._functions)
        if not all(map(math.isfinite, self._weights)):
            raise UserError(f"reward.weights: {self._weights} has a weight that is not finite; give numbers")
        self._labels = _labels(self._functions)
        self._processes = Processes(section.processes, self._functions, section.arguments)
        self._episodes: dict[Name, _Episode] = {}
        self._begun = 0

    @property
    def turns(self) -> bool:
        """True if the reward is an episode: ``begin``, ``answer`` and ``drop`` go with it, and ``score`` does not.

        Loads the functions. Raises `UserError`.
        """
        forms = self._processes.load()
        if "episode" in forms and len(forms) > 1:
            name = self._functions[forms.index("episode")]
            raise UserError(f"reward.function: {name} is an episode, which is the only function; remove the others")
        return forms == ["episode"]

    @property
    def whole(self) -> bool:
        """True if a function takes the list of all samples of a step, so that they must be scored by one call.

        Loads the functions. Raises `UserError`.
        """
        return any(form in LISTS for form in self._processes.load())

    def check(self, records: Sequence[tuple[Mapping[str, Any], str]]) -> None:
        """Load the functions and call them for the first of ``records``, (record, where), with an empty completion.

        Raises:
            UserError: a file or function is missing or cannot be imported, a function raises or returns no reward, or
                takes longer than its limit; of an episode, it does not yield messages first.
        """
        tried = [(Sample(0, number, 0, []), *record) for number, record in enumerate(records[:CHECKED])]
        is_episode = self.turns
        if not tried:
            return
        if is_episode:
            prompts = [Prompt(sample.prompt, [], record, where) for sample, record, where in tried]
            names = [sample.name for sample, _, _ in tried]
            slow = [isinstance(turn, Reward) for turn in self.begin(names, prompts)]
            self.drop(names)
        else:
            slow = [reward.slow for reward in self._score(tried)]
        if any(slow):
            where = tried[slow.index(True)][2]
            raise UserError(
                f"reward.seconds: {', '.join(self._functions)} took longer than {self._seconds:g} s for {where} and an "
                "empty answer; make it faster, or raise the limit"
            )

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Reward]:
        """Return the reward of each sample; ``prompts[i]`` is the prompt of ``samples[i]``.

        With ``whole``, the samples of one call are the list that such a function gets.

        Raises:
            UserError: a function raises, returns no reward, or ends its process: of the first such sample.
        """
        assert not self.turns, "an episode gives its reward at its end"
        return self._score([(s, prompt.record, prompt.where) for s, prompt in zip(samples, prompts, strict=True)])

    def begin(self, names: Sequence[Name], prompts: Sequence[Prompt]) -> list[Turn]:
        """Begin the episodes of samples, and return the first turn of each: messages, perhaps none.

        A ``Reward`` instead is slow, and the episode has ended.

        Raises:
            UserError: as ``score``.
        """
        for name, prompt in zip(names, prompts, strict=True):
            about = _about(prompt.where, *name)
            self._episodes[name] = _Episode(prompt.record, about, self._begun % len(self._processes))
            self._begun += 1
        return self._turns(names)

    def answer(self, texts: Mapping[Name, str]) -> dict[Name, Turn]:
        """Give episodes the model's answers; return the next turn of each. One that gives a ``Reward`` has ended.

        Raises:
            UserError: as ``score``.
        """
        for name, text in texts.items():
            self._episodes[name].answers.append(text)
        return dict(zip(texts, self._turns(list(texts)), strict=True))

    def drop(self, names: Iterable[Name]) -> None:
        """Close episodes that get no further answer, such as those without room for one; ignore names of no episode.

        Raises:
            UserError: an episode raises when it is closed.
        """
        found = [(_key(name), self._episodes.pop(name)) for name in names if name in self._episodes]
        live = [(key, episode) for key, episode in found if self._processes.is_live(episode.place)]
        answers = self._processes.run([Call({"drop": [key]}, self._seconds, episode.place) for key, episode in live])
        for (_, episode), answer in zip(live, answers, strict=True):
            self._succeeded(answer, 0, [episode.about])

    def close(self) -> None:
        """End the processes."""
        self._episodes.clear()
        self._processes.close()

    def _turns(self, names: Sequence[Name]) -> list[Turn]:
        calls = []
        for name in names:
            episode = self._episodes[name]
            request = {"episode": _key(name), "record": episode.record, "answers": episode.answers}
            calls.append(Call(request, self._seconds, episode.place))
        turns: list[Turn] = []
        for name, answer in zip(names, self._processes.run(calls), strict=True):
            answer = self._succeeded(answer, 0, [self._episodes[name].about])
            if "messages" in answer.content:
                turns.append(answer.content["messages"])
            else:
                del self._episodes[name]
                turns.append(Reward(0.0, slow=True) if answer.slow else self._sum([answer.content["rewards"][0]]))
        return turns

    def _score(self, asked: Sequence[tuple[Sample, Mapping[str, Any], str]]) -> list[Reward]:
        """Return the reward of each (sample, record, where)."""
        forms, everything = self._processes.load(), range(len(asked))
        # (function, samples) of each call. Lists first: they take the longest.
        plan = [(number, everything) for number, form in enumerate(forms) if form in LISTS and asked]
        plan += [(n, range(i, i + 1)) for i in everything for n, form in enumerate(forms) if form not in LISTS]
        calls = []
        for number, which in plan:
            inputs = [(asked[i][1], vars(asked[i][0])) for i in which]
            calls.append(Call({"function": number, "inputs": inputs}, self._seconds))
        found: list[list[Any]] = [[None] * len(forms) for _ in asked]  # None: too slow
        for (number, which), answer in zip(plan, self._processes.run(calls), strict=True):
            answer = self._succeeded(answer, number, [_about(asked[i][2], *asked[i][0].name) for i in which])
            for i, reward in zip(which, answer.content.get("rewards", []), strict=not answer.slow):
                found[i][number] = reward
        return [self._sum(rewards) for rewards in found]

    def _sum(self, rewards: Sequence[tuple[float, dict[str, float]] | None]) -> Reward:
        if None in rewards:
            return Reward(0.0, slow=True)
        found = [each for each in rewards if each is not None]
        total = sum(weight * reward for weight, (reward, _) in zip(self._weights, found, strict=True))
        if len(found) == 1:
            return Reward(total, found[0][1])
        parts: dict[str, float] = {}
        for label, (reward, own) in zip(self._labels, found, strict=True):
            parts |= {label: reward, **{f"{label}.{name}": part for name, part in own.items()}}
        return Reward(total, parts)

    def _succeeded(self, answer: Answer | None, function: int, about: Sequence[str]) -> Answer:
        """Return an answer that is no failure; else raise what it says about the function and its samples."""
        assert answer is not None, "an earlier call failed, and raises first"
        if not answer.failed:
            return answer
        at = answer.content.get("at")
        which = about[at or 0] if at is not None or len(about) == 1 else f"{len(about)} samples, from {about[0]} on"
        problem = f"its process {answer.ended}" if answer.ended else answer.content["error"]
        raise UserError(f"reward.function: {self._functions[function]} failed for {which}: {problem}; correct it")


class CalledReward:
    """A reward function that is called in this process, without a time limit: for a loop of one's own."""

    turns = False

    def __init__(self, function: Callable[..., Any]) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        self._function = Function(function, form_of(function, name), {}, None)
        if self._function.form == "episode":
            raise ValueError(f'{name} is an episode, which runs in a process of its own; give "file.py:{name}"')
        self._name, self.whole = name, self._function.form in LISTS

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Reward]:
        """Return the reward of each sample. Raises `ValueError` for what is no reward, and what the function raises."""
        result = []
        groups = [range(len(samples))] if self.whole else [range(i, i + 1) for i in range(len(samples))]
        for places in groups:
            value = self._function.on([dict(prompts[i].record) for i in places], [samples[i] for i in places])
            try:
                result += [Reward(*each) for each in rewards_of(value, self._function, len(places))]
            except Wrong as error:
                about = _about(prompts[places[0]].where, *samples[places[0]].name)
                raise ValueError(f"{self._name} failed for {about}: {error}") from None
        return result

    def close(self) -> None:
        """Do nothing."""


def _about(where: str, step: int, prompt: int, sample: int) -> str:
    return f"{where} (prompt {prompt}, sample {sample} of step {step})"


def _key(name: Name) -> str:
    return "/".join(map(str, name))


def _labels(functions: Sequence[str]) -> list[str]:
    """Return a short name for each function: its own, with its file's where two have the same one."""
    pairs = [(Path(path).stem, name) for path, _, name in (words.rpartition(":") for words in functions)]
    count = Counter(name for _, name in pairs)
    labels = [name if count[name] == 1 else f"{stem}.{name}" for stem, name in pairs]
    if len(set(labels)) < len(labels):
        raise UserError(f"reward.function: {', '.join(functions)}: two have the same name; rename a function or a file")
    return labels
