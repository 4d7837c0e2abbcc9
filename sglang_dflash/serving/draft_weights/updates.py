"""New weights for the draft of a running server, in the ways in which SGLang takes a target's.

SGLang gives an update to *runners*, each with a `weight_updater`. Our drafter is none of them:
`with_draft` puts into their list what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

import torch
from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.draft_keys import is_draft
from sglang_dflash.checkpoint.stored import plain_name
from sglang_dflash.checkpoint.tensors import check_weights
from sglang_dflash.common.errors import ConfigError, cut
from sglang_dflash.common.log import Log
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.weights import check_new, draft_tensors, reload

logger = Log(__name__)

# Where tensors are for both (selector "all", SGLang's default), the draft's have this before their
# names: without it, names of the target's layers may be the same.
MARK = "draft."
BUCKET = "flattened_bucket"
T = TypeVar("T")
Named = Iterable[tuple[str, Any]]
Result = tuple[bool, str]
_DIFFERENT = "ranks were given different tensors of the draft"


def with_draft(runners: list[Any], manager: Any, selector: str = "all") -> list[Any] | None:
    """After `SchedulerWeightUpdaterManager._select_runners`: what an update is given to."""
    worker = manager.draft_worker
    draft = DraftWeights(worker.draft_model, manager.tp_cpu_group)
    if selector == "draft":
        return [("draft", draft)]
    if worker.dflash.rollback is not None:
        worker.dflash.rollback.expect_new_weights()
    if selector == "all":
        record_again = worker.record_again
        return [(role, TargetAndDraft(runner, draft, record_again)) for role, runner in runners]
    return None


class DraftWeights:
    """The draft of a rank, as SGLang's runner and its `weight_updater` in one.

    Nothing is loaded unless every tensor is right, on every rank.
    """

    def __init__(self, model: DraftModel, ranks: Any) -> None:
        """`ranks`: their process group on the CPU."""
        self._model, self._ranks = model, ranks

    @property
    def weight_updater(self) -> DraftWeights:
        return self

    def begin_weight_update(self) -> None:
        """Nothing has to be unpacked."""

    def end_weight_update(self, *, run_post_load: bool) -> None:
        """Nothing is left to do."""

    def check_weights(self, **_: Any) -> None:
        raise NotImplementedError("a draft's weights are not compared; the target's are")

    def update_weights_from_tensor(self, named_tensors: Any, load_format: Any = None) -> Result:
        if load_format in (None, BUCKET):
            return self.load(lambda: unpacked(named_tensors))
        required = f"null or {BUCKET!r} is required for a draft"
        return False, str(ConfigError("load_format", load_format, required))

    def load_weights_from_distributed(self, named_tensors: Named) -> Result:
        return self.load(lambda: named_tensors)

    def load_folder(self, folder: str) -> Result:
        def read() -> Named:
            config = DraftConfig.from_pretrained(folder)
            check_same(config, self._model.config)
            check_weights(config, folder)
            return draft_tensors(config, folder, self._model.dtype).items()

        return self.load(read)

    def load(
        self, read: Callable[[], Named], first: Callable[[], Result] = lambda: (True, "")
    ) -> Result:
        """Load what `read` returns, tensors by their published names.

        Args:
            first: another model's update, once the tensors are found right.
        """
        tensors = dict[str, Tensor]()

        def check() -> Result:
            try:
                tensors.update(self.checked(read()))
            except ConfigError as error:
                return False, str(error)
            # A client's mistakes have many types, and other ranks wait for this one.
            except Exception as error:
                return False, f"{type(error).__name__}: {cut(str(error))}"
            return True, ""

        success, trouble = self._on_every_rank(check)
        if success and not self._have_the_same(tensors):
            success, trouble = False, _DIFFERENT
        if not success:
            return False, f"{trouble}. The weights are unchanged"
        return self.install(tensors, first)

    def install(self, tensors: dict[str, Tensor], first: Callable[[], Result]) -> Result:
        """Replace the weights by `checked` tensors, on all ranks or on none.

        Args:
            first: another model's update, which may add to the tensors. The draft's follows if it
                succeeds on every rank.
        """
        success, message = self._on_every_rank(first)
        if success and not self._have_the_same(tensors):
            return False, f"{_DIFFERENT}. The draft's weights are unchanged, the target's are not"
        if success and tensors:
            self.replace(tensors)
            message = f"Succeeded to update the draft, {len(tensors)} tensors. {message}".rstrip()
        return success, message

    def _on_every_rank(self, run: Callable[[], Result]) -> Result:
        """Run it here. Returns the result of a rank on which it failed, else that of this one, and
        raises what it raises here once the others know."""
        raised = None
        try:
            result = run()
        except Exception as error:
            raised, result = error, (False, f"{type(error).__name__}: {cut(str(error))}")
        results = self.gathered(result)
        if raised is not None:
            raise raised
        return next((other for other in results if not other[0]), result)

    def _have_the_same(self, tensors: dict[str, Tensor]) -> bool:
        """Return whether every rank has tensors of these names."""
        names = sorted(tensors)
        return all(others == names for others in self.gathered(names))

    def gathered(self, value: T) -> list[T]:
        """A value of every rank. Each has to call it."""
        if self._model.tp.size == 1:
            return [value]
        values = [value] * self._model.tp.size
        torch.distributed.all_gather_object(values, value, group=self._ranks)
        return values

    def checked(self, named: Named) -> dict[str, Tensor]:
        """Tensors on the draft's device, by their plain names. Raises ConfigError."""
        tensors: dict[str, Tensor] = {}
        for sent, value in named:
            name = plain_name(sent)
            if name in tensors:
                raise ConfigError(f"tensor {name} of the draft", required="given twice")
            # A tensor for each rank.
            by_rank = isinstance(value, LocalSerializedTensor)
            tensor = value.get(self._model.tp.rank) if by_rank else value
            tensors[name] = tensor.to(self._model.device)
        check_new(self._model, tensors)
        return tensors

    def replace(self, tensors: dict[str, Tensor]) -> None:
        """Replace the weights by `checked` tensors."""
        # Steps run on another stream.
        device = torch.get_device_module(self._model.device)
        device.synchronize()
        reload(self._model, tensors)
        device.synchronize()
        logger.info("new weights for the draft: %d tensors", len(tensors))


class TargetAndDraft:
    """SGLang's runner of the target and its `weight_updater`, which leaves the draft's tensors to
    the draft. The draft's are checked first and loaded last."""

    def __init__(self, runner: Any, draft: DraftWeights, record_again: Callable[[], None]) -> None:
        """`record_again`: records draft steps anew."""
        self._runner, self._target, self._draft = runner, runner.weight_updater, draft
        self._record_again = record_again

    @property
    def weight_updater(self) -> TargetAndDraft:
        return self

    def begin_weight_update(self) -> None:
        self._target.begin_weight_update()

    def end_weight_update(self, *, run_post_load: bool) -> None:
        self._target.end_weight_update(run_post_load=run_post_load)

    def check_weights(self, **arguments: Any) -> Any:
        return self._runner.check_weights(**arguments)

    def update_weights_from_tensor(self, named_tensors: Any, load_format: Any = None) -> Result:
        def load_target(named: Any) -> Result:
            return self._target.update_weights_from_tensor(
                named_tensors=named, load_format=load_format
            )

        if load_format not in (None, BUCKET):
            # A format of SGLang's runner, or an operator's own.
            return load_target(named_tensors)
        # A rank has tensors of its own.
        if not any(self._draft.gathered(_has_marked(named_tensors))):
            return load_target(named_tensors)
        return self._load(named_tensors, load_target)

    def load_weights_from_distributed(self, named_tensors: Named) -> Result:
        named = list(named_tensors)
        load_target = self._target.load_weights_from_distributed
        # All ranks have the request's names: one whose receive has failed is not here.
        if not _has_marked(named):
            return load_target(named)
        return self._load(named, load_target)

    def update_weights_from_disk(self, folder: str, *args: Any, **named: Any) -> Result:
        # A node may lack the folder.
        if any(self._draft.gathered(is_draft(folder))):
            return self._draft.load_folder(folder)
        result = self._target.update_weights_from_disk(folder, *args, **named)
        if result[0] and named.get("recapture_cuda_graph"):
            # Draft steps read the target's lm_head, which may be elsewhere now.
            self._record_again()
        return result

    def update_weights_from_ipc(self, request: Any) -> Result:
        tensors = dict[str, Tensor]()

        def update() -> Result:
            with self._set_apart(tensors):
                return self._target.update_weights_from_ipc(request)

        return self._draft.install(tensors, update)

    def _load(self, named: Any, load_target: Callable[[Any], Result]) -> Result:
        theirs: Any = []

        def read() -> Named:
            nonlocal theirs
            ours, theirs = split(named)
            return ours

        return self._draft.load(read, lambda: load_target(theirs) if theirs else (True, ""))

    @contextmanager
    def _set_apart(self, tensors: dict[str, Tensor]) -> Iterator[None]:
        """Put the draft's tensors of what the target's model is to load into `tensors`: its updater
        makes one handshake for each update, reuses its memory, and catches errors."""
        model = self._runner.model
        load_target = model.load_weights

        def load(named: Named) -> None:
            ours, theirs = split(list(named))
            checked = self._draft.checked(ours)
            tensors.update((name, tensor.clone()) for name, tensor in checked.items())
            if theirs:
                load_target(theirs)

        model.load_weights = load
        try:
            yield
        finally:
            del model.load_weights


def split(named: Any) -> tuple[list[tuple[str, Any]], Any]:
    """The draft's tensors, without `MARK`, and the others as they came; empty if there are none."""
    if isinstance(named, dict):
        bucket = named["metadata"]
        ours = [entry for entry in bucket if entry.name.startswith(MARK)]
        theirs = [entry for entry in bucket if not entry.name.startswith(MARK)]
        draft_tensors = unpacked({**named, "metadata": ours}) if ours else []
        others: Any = {**named, "metadata": theirs} if theirs else {}
    else:
        draft_tensors = [pair for pair in named if pair[0].startswith(MARK)]
        others = [pair for pair in named if not pair[0].startswith(MARK)]
    return [(name.removeprefix(MARK), value) for name, value in draft_tensors], others


def _has_marked(named: Any) -> bool:
    """Return whether a tensor is the draft's; False for an unreadable value, which the target's
    updater judges if no rank has a draft tensor."""
    try:
        names = (
            [entry.name for entry in named["metadata"]]
            if isinstance(named, dict)
            else [name for name, _ in named]
        )
        return any(name.startswith(MARK) for name in names)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def unpacked(named: Any) -> list[tuple[str, Any]]:
    """Names and tensors, also of a bucket."""
    if not isinstance(named, dict):
        return list(named)
    bucket = FlattenedTensorBucket(
        flattened_tensor=named["flattened_tensor"], metadata=named["metadata"]
    )
    return bucket.reconstruct_tensors()


def check_same(config: DraftConfig, served: DraftConfig) -> None:
    """Raise ConfigError if the server was not started for a draft of that config. How weights are
    stored does not matter: they are served dequantized. Nor do keys that have no effect here."""
    for name in [each.name for each in fields(served) if each.compare]:
        if name == "quantization":
            continue
        new, old = getattr(config, name), getattr(served, name)
        if new != old:
            required = f"the served draft has {old!r}; start a server with this draft"
            raise ConfigError(f"{name} in the draft's config.json", new, required)
