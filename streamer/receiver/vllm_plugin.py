"""What vLLM finds through ``vllm.general_plugins``: it makes the backend ``streamer`` known."""

BACKEND = "streamer"


def register() -> None:
    """Register our engine with vLLM. Called in every process of a server, maybe more than once."""
    from vllm.distributed.weight_transfer.factory import (  # noqa: TID251
        WeightTransferEngineFactory,
    )

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "streamer.receiver.vllm_engine", "StreamerWeightTransferEngine"
        )
