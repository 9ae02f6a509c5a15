"""The engine that runs inside a vLLM server, started with the backend ``streamer``.

    pip install .                   # in a checkout of streamer, into vLLM's environment
    vllm serve MODEL --weight-transfer-config '{"backend": "streamer"}'

It receives over NCCL on GPUs and over Gloo on CPUs, where vLLM itself has no engine. When the
trainer dies it leaves the broadcast, and the server goes on.

This is the one module of streamer that imports vLLM.
"""
# ruff: noqa: TID251

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from streamer.exceptions import TransportError
from streamer.receiver import OCCUPIED
from streamer.receiver.endpoint import Endpoint, InitInfo

log = logging.getLogger("streamer")

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig


class StreamerWeightTransferEngine(WeightTransferEngine[Any, Any]):  # type: ignore[misc]
    """Receives weights into one worker's model.

    vLLM's executor reads the workers' replies in rank order and stops at the first that failed,
    leaving the others queued: later calls then get old answers. So after each step the workers
    agree, over vLLM's own CPU group, whether one of them failed; if so all of them put their
    layers back into a usable state and the last rank alone raises. The others' replies have been
    read by then, and the server goes on answering.
    """

    init_info_cls = InitInfo
    update_info_cls = dict

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = self.parallel_config
        self._rank = parallel.rank
        self._is_last = parallel.rank == parallel.world_size - 1
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._endpoint = Endpoint(torch.device(device), worker)
        self._loading = False
        """Layers are on the meta device, waiting for weights."""
        self._open_in_vllm = False
        """What vLLM's worker believes: it refuses a start while this is so."""

    def parse_init_info(self, init_dict: dict[str, Any]) -> dict[str, Any]:
        """Left as it is: what raises here raises on every worker, out of step."""
        return init_dict

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        # All are asked, and may differ: a failed update is an error on the last worker alone.
        syncing = self._open_in_vllm and self._endpoint.is_syncing()
        if any(self._gather("syncing" if syncing else "")):
            if self._is_last:
                raise TransportError(OCCUPIED)
            return

        def join() -> None:
            self._endpoint.join(InitInfo.parse(init_info), update_open=self._open_in_vllm)

        self._agree(join)

    def start_weight_update(self) -> None:
        self._agree(self._start)
        self._open_in_vllm = True

    def _start(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        self._loading = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one call. Complete on the device when it returns."""
        self.receive_weights(update_info)

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        def receive() -> None:
            if not self._loading:
                raise TransportError("this update has failed already: finish it, start another")
            with disable_mtp_completeness_check():
                self._endpoint.receive(update_info, self._allocate, self.model.load_weights)

        try:
            self._agree(receive)
        except BaseException:
            self._open_in_vllm = False
            raise

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """A fresh buffer each time: layerwise loading keeps views of it until the finish."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def finish_weight_update(self) -> None:
        # After a failed update vLLM lets the finish through to all workers but the last, which
        # refuses it: there is nothing left to do here, and nobody to agree with.
        if self._loading:
            self._agree(self._finalize)
        self._open_in_vllm = False

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._loading = False
        finalize_layerwise_reload(self.model, self.model_config)

    def _agree(self, step: Callable[[], None]) -> None:
        """Run ``step``; if it failed on any worker, finalise on all, and raise on the last one."""
        failure: BaseException | None = None
        try:
            step()
        except Exception as error:
            failure = error
        messages = self._gather("" if failure is None else f"{type(failure).__name__}: {failure}")
        failed = {rank: text for rank, text in enumerate(messages) if text}
        if not failed:
            return
        self._endpoint.abort("another worker failed")
        if self._loading:
            try:
                self._finalize()
            except Exception:
                # Only the last worker may raise, or they answer vLLM out of step.
                log.exception("the layers of a failed update could not be put back")
        if self._is_last:
            text = "; ".join(f"worker {rank}: {text}" for rank, text in failed.items())
            raise TransportError(text) from failure

    def _gather(self, message: str) -> list[str]:
        """Every worker's message, in rank order, over vLLM's own CPU group (no pickle)."""
        group = get_world_group()
        if group.world_size == 1:
            return [message]
        mine = torch.zeros(512, dtype=torch.uint8, device="cpu")
        data = message.encode()[: mine.numel()]
        mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
            : len(data)
        ]
        everyone = [torch.empty_like(mine) for _ in range(group.world_size)]
        torch.distributed.all_gather(everyone, mine, group=group.cpu_group)
        return [bytes(item.tolist()).rstrip(b"\0").decode(errors="replace") for item in everyone]

    def shutdown(self) -> None:
        self._endpoint.leave()
