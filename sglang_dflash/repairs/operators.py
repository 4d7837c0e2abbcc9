"""Endpoints for operators that would end the server."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException


def refuse_without_recorder(manager: Any) -> None:
    """Before the methods of `TokenizerManager` that record the distribution of experts.

    Raises:
        HTTPException: status 400, if there is nothing that records it.
    """
    if manager.server_args.expert_distribution_recorder_mode is None:
        raise HTTPException(400, "start the server with --expert-distribution-recorder-mode")
