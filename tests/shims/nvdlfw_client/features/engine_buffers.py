"""What is kept of tensors until the step ends, as Transformer Engine does."""

import torch
from nvdlfw_inspect.logging import MetricLogger
from nvdlfw_inspect.utils import gather_along_first_dim


class Buffers:
    """Sums of tensors by layer and tensor."""

    def __init__(self):
        self.sums = {}
        self.ended = 0

    def feed(self, layer_name, tensor_name, tensor, iteration):
        before = self.sums.get((layer_name, tensor_name), (0.0, 0))[0]
        self.sums[layer_name, tensor_name] = (before + float(tensor.sum()), iteration)

    def log(self):
        for (layer_name, tensor_name), (total, iteration) in self.sums.items():
            gathered, _ = gather_along_first_dim(torch.tensor([total]), process_group=None)
            MetricLogger.log_scalar(f"{layer_name}_{tensor_name}_sum", gathered.sum(), iteration)
        self.sums.clear()


BUFFERS = Buffers()
