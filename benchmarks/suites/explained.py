"""Why a test fails with TrueShard: what it assumes, or what is refused. What is not here stands on the page as open."""

from __future__ import annotations

import re

_ONE = "expects one process: "
_WHY = (
    (
        r"number_of_steps|from_interrupted|every_n_train_steps|train_time_interval",
        _ONE + "twice the samples in a step make half the steps",
    ),
    (r"test_training_loss|test_evaluate|batch_eval_metrics", _ONE + "its own figure is of one process's batches"),
    (r"test_log_level", _ONE + "the second one does not log"),
    (
        r"save_checkpoints|with_checkpoint|shard_checkpoint|save_best_checkpoint",
        _ONE + "reads at steps of its own count",
    ),
    (r"best_model_at_end|from_safetensors|best_model_checkpoint_behavior", _ONE + "reads at steps of its own count"),
    (
        r"checkpoint_rotation|checkpoint_sorting|checkpoints_r|link_checkpoint",
        _ONE + "each makes and removes the same folders",
    ),
    (
        r"can_resume_training|frozen_params|gradient_accumulation",
        _ONE + "compares states of which only the first is saved",
    ),
    (
        r"resume_batch_order",
        "a buffer of its model grows, and its `load_state_dict` resizes it: `load` needs equal shapes",
    ),
    (
        r"'other' \(position 2\) must be Tensor, not NoneType",
        "reads `.grad` between microbatches: whole gradients of a step are kept apart until the last one",
    ),
    (
        r"unwrap_model",
        "pickles the model, which would write a rank's shards alone: refused, by the call to use instead",
    ),
    (
        r"8bit_cpu_offload",
        "expects Accelerate's error for a model in 8 bits with parts on the CPU; it is sharded as it is",
    ),
    (r"optimizer_pickling", "prepares an optimizer whose model it does not: refused, since it cannot be sharded"),
    (r"returning None", _ONE + "Lightning refuses a step that returns None on several"),
    (r"DID NOT WARN|did not match any of the", _ONE + "the second one does not warn"),
    (
        r"buffer length \(0\)",
        "replaces `torch.save` by a mock and counts its calls: a folder's bytes come from that call",
    ),
    (r"storage_options", "gives `storage_options`: refused, a checkpoint is written by `trueshard.save`"),
    (r"LBFGS", "steps with LBFGS: refused, it cannot step shards"),
    (
        r"optimizer_closure",
        "counts calls of a mocked step, or compares a parameter with a plain tensor: it is a DTensor",
    ),
    (
        r"object has no attribute 'trainer'|not attached",
        "calls Lightning's connector on a module that no `Trainer` holds",
    ),
    (r"Checkpoint file not found", "expects Lightning's words of the error that names a missing checkpoint"),
    (r"cross-device", "replaces functions that rename by ones that fail, to try Lightning's own writer"),
    (r"pickle_dataloader", _ONE + "counts batches of one process"),
    (
        r"isfile|IsADirectory|Is a directory",
        "reads the checkpoint as one file: it is a folder, and `consolidate` makes the file",
    ),
)
"""Pattern of a test's name or of its message → why; the first counts."""


def explanation(name: str, message: str) -> str:
    """Return why a test fails, or its message."""
    for patterns in (message, name):
        for pattern, why in _WHY:
            if re.search(pattern, patterns):
                return why
    return "open: " + re.sub(r"/\S*/", "…/", message.replace("|", "/").replace("`", "'"))[:120]
