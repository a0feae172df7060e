"""The smallest program in which PyTorch 2.13 writes behind its memory, as far as we know.

    python scripts/torch_heap_least.py      # ends by a signal

It is the gradient of the weight of a 1x1 filter with stride 2, of channels-last images with three
channels. No tilewise is involved; scripts/torch_heap.py has more.
"""

import torch

last = torch.channels_last
for _ in range(300):
    images = torch.randn(1, 3, 224, 224).contiguous(memory_format=last)
    weight = torch.randn(64, 3, 1, 1, requires_grad=True)
    torch.nn.functional.conv2d(images, weight.contiguous(memory_format=last), stride=2).sum(
        ).backward()
print("nothing happened")
