"""Which tests of which library: those about training, accumulation, resuming, evaluation, saving and best models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """Test files of one library."""

    name: str
    library: str
    """Its distribution, by whose name its sources lie in the folder of sources."""
    repository: str
    """On GitHub; its tags are ``v`` and the version."""
    root: str
    """Folder in its sources where pytest starts."""
    files: tuple[str, ...]
    skipped: str = ""
    """Expression of pytest's ``-k`` for tests that are left out."""
    base: str = "one"
    """System with which a test is to pass to be counted."""


SUITES = (
    Suite(
        "transformers",
        "transformers",
        "huggingface/transformers",
        ".",
        (
            "tests/trainer/test_trainer.py",
            "tests/trainer/test_trainer_checkpointing.py",
            "tests/trainer/test_trainer_evaluation.py",
            "tests/trainer/test_trainer_optimizers.py",
        ),
        "not compile and not JIT and not Greedy",
    ),
    Suite(
        "accelerate",
        "accelerate",
        "huggingface/accelerate",
        ".",
        (
            "tests/test_accelerator.py",
            "tests/test_state_checkpointing.py",
            "tests/test_optimizer.py",
        ),
        "not compile",
    ),
    Suite(
        "accelerate's scripts",
        "accelerate",
        "huggingface/accelerate",
        ".",
        (
            "--pyargs",
            "accelerate.test_utils.scripts.test_sync",
            "accelerate.test_utils.scripts.test_distributed_data_loop",
        ),
        base="ddp",
    ),
    Suite(
        "lightning",
        "lightning",
        "Lightning-AI/pytorch-lightning",
        "tests",
        (
            "tests_pytorch/checkpointing/test_checkpoint_callback_frequency.py",
            "tests_pytorch/checkpointing/test_model_checkpoint.py",
            "tests_pytorch/checkpointing/test_trainer_checkpoint.py",
            "tests_pytorch/trainer/optimization/test_backward_calls.py",
            "tests_pytorch/trainer/optimization/test_manual_optimization.py",
            "tests_pytorch/trainer/optimization/test_multiple_optimizers.py",
            "tests_pytorch/trainer/optimization/test_optimizers.py",
            "tests_pytorch/trainer/connectors/test_checkpoint_connector.py",
        ),
    ),
)
