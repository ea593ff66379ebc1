"""Entry point of group ``vllm.general_plugins``: vLLM calls `register` in each of its processes, some several times."""


def register() -> None:
    """Put qurl's W8A8 kernels in front of vLLM's for CPUs; elsewhere nothing happens.

    An engine made with ``additional_config={"qurl_kernels": False}`` gets vLLM's own.
    """
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.kernels import linear

    from qurl.rollout.kernels.vllm_linear import FP8Linear, Int8Linear

    for kind, kernel, choices in (
        ("int8", Int8Linear, linear._POSSIBLE_INT8_KERNELS),
        ("fp8", FP8Linear, linear._POSSIBLE_FP8_KERNELS),
    ):
        order = choices[PlatformEnum.CPU]
        if kernel not in order:
            # vLLM's own registration puts a kernel last, where it would never be reached.
            linear.register_linear_kernel(kernel, PlatformEnum.CPU, kind)
            order.insert(0, order.pop())
