"""Everything that is measured for README.md and docs, by the commands that readers are shown.

    python scripts/results.py                        # all of it; wants a quiet machine, and hours
    python scripts/results.py vgg16 ladder           # some of it
    python scripts/results.py --quick --into build/results    # small settings, to try it

Needs the extras `bench`, `gpu`, `images`, `scale` and `test`. `make figures` draws what was
measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TINY = "n1c8h8w8k8r3s3p1_f32_forward+bias+relu"


class Made(NamedTuple):
    """A result file, NAME.json: the command that makes it, and what makes a small one."""

    command: str
    quick: str


MADE = {
    "vgg16": Made("tilewise bench model vgg16 --batch 8 --rounds 5 "
                  "--against torch,openvino,onnxruntime,ncnn,mnn -o vgg16.json",
                  "tilewise bench model lenet_a --batch 1 --rounds 2 --no-compile -o vgg16.json"),
    "vgg_layers": Made("tilewise bench suite vgg --batch 8 -o vgg_layers.json",
                       "tilewise bench suite lenet --batch 1 --rounds 2 -o vgg_layers.json"),
    "ladder": Made("tilewise ladder n8c64h56w56k64r3s3p1_f32_forward+bias+relu -o ladder.json",
                   f"tilewise ladder {TINY} --rounds 2 -o ladder.json"),
    "errors": Made("python benchmarks/errors.py -o errors.json",
                   "python benchmarks/errors.py -o errors.json"),
    "amx_errors": Made("python benchmarks/amx.py --errors amx_errors.json",
                       "python benchmarks/amx.py --errors amx_errors.json"),
    "quickstart": Made("python scripts/transcript.py -o quickstart.json",
                       "python scripts/transcript.py --model lenet_a --batch 1 --rounds 2 "
                       "-o quickstart.json"),
    "filter2d": Made("python benchmarks/filter2d.py --all -o filter2d.json",
                     "python benchmarks/filter2d.py --sizes 64 --kernels 3 -o filter2d.json"),
    "images": Made("python benchmarks/images.py -o images.json",
                   "python benchmarks/images.py --sizes 64 --types uint8 -o images.json"),
    "images_large": Made(
        "python benchmarks/images.py --volume 512 --memmap 40000 -o images_large.json",
        "python benchmarks/images.py --volume 40 --memmap 900 -o images_large.json"),
    "images_equal": Made("python benchmarks/images.py --equal 20000 -o images_equal.json",
                         "python benchmarks/images.py --equal 250 -o images_equal.json"),
    "train_fashion_mnist": Made(
        "python benchmarks/train_fashion_mnist.py runs --best -o train_fashion_mnist.json",
        "python benchmarks/train_fashion_mnist.py build/quick-runs --model lenet_b --epochs 1 "
        "--limit 256 --engines torch tilewise -o train_fashion_mnist.json"),
    "train_resnet18": Made(
        "python benchmarks/train_fashion_mnist.py runs-18 --model resnet18 --size 64 "
        "--seeds 0 1 2 --engines torch-channels-last tilewise -o train_resnet18.json",
        "python benchmarks/train_fashion_mnist.py build/quick-18 --model lenet_b --epochs 1 "
        "--limit 256 --seeds 0 1 --engines torch tilewise -o train_resnet18.json"),
    "train_ranks": Made("python benchmarks/train_ranks.py --runs 200 --ranks 2 2 2 4 "
                        "-o train_ranks.json",
                        "python benchmarks/train_ranks.py --runs 2 --ranks 2 -o train_ranks.json"),
    "train_killed": Made("python benchmarks/train_killed.py -o train_killed.json",
                         "python benchmarks/train_killed.py --model lenet_b --size 70 --kills 2 "
                         "-o train_killed.json"),
    "training": Made("python benchmarks/training.py resnet18 resnet50 vgg16 unet:2 "
                     "mobilenet_v2:16 efficientnet_b0:16 mobilenet_v3_large:16 "
                     "shufflenet_v2_x1_0:16 regnet_y_1_6gf -o training.json",
                     "python benchmarks/training.py shufflenet_v2_x1_0:2 --rounds 2 --no-compile "
                     "-o training.json"),
    "training_unit": Made(
        "python benchmarks/training.py resnet18 resnet50 resnet50:32 vgg16 unet:2 "
        "mobilenet_v2:16 efficientnet_b0:16 mobilenet_v3_large:16 shufflenet_v2_x1_0:16 "
        "regnet_y_1_6gf --precision highest high -o training_unit.json",
        "python benchmarks/training.py shufflenet_v2_x1_0:2 --rounds 2 --no-compile "
        "-o training_unit.json"),
    "training_zoo": Made(
        "python benchmarks/training.py seresnet50:4 densenet121:4 squeezenet1_0:8 "
        "convnext_tiny:4 googlenet:8 inception_v3:4 wide_resnet50_2:4 resnext50_32x4d:4 "
        "hrnet_w18_small:4 cspdarknet53:4 ghostnet_100:8 mobilenetv4_conv_medium:8 "
        "efficientnetv2_rw_t:4 resnest26d:4 dla34:4 res2net50_26w_4s:4 convnextv2_nano:4 "
        "repvgg_a2:4 fastvit_t8:4 yolov8n:4 yolov8s:2 yolo11n:4 yolo26n:4 deeplabv3:2 smp_unet:2 "
        "smp_fpn:2 text_detector:2 esrgan:1 dncnn:4 sd_vae:1 monai_unet:2 audio1d:4 seg3d:2 "
        "--no-compile --rounds 9 -o training_zoo.json",
        "python benchmarks/training.py shufflenet_v2_x1_0:2 --rounds 2 --no-compile "
        "-o training_zoo.json"),
    "training_blocks": Made("python benchmarks/training_blocks.py "
                            "-o training_blocks.json",
                            "python benchmarks/training_blocks.py --seeds 0 4 "
                            "-o training_blocks.json"),
    "bfloat16": Made("python benchmarks/bfloat16.py resnet18 resnet50 mobilenet_v2 "
                     "--rounds 3 -o bfloat16.json",
                     "python benchmarks/bfloat16.py mobilenet_v2 --rounds 2 --no-compile "
                     "--against -o bfloat16.json"),
    "bfloat16_large": Made("python benchmarks/bfloat16.py vgg16 yolov8n --rounds 3 --no-compile "
                           "-o bfloat16_large.json",
                           "python benchmarks/bfloat16.py resnet18 --rounds 2 --no-compile "
                           "--against -o bfloat16_large.json"),
    "bfloat16_batch": Made(
        "python benchmarks/bfloat16.py resnet18 resnet50 mobilenet_v2 --batch 8 --rounds 3 "
        "--budget 10 --no-compile --against -o bfloat16_batch.json",
        "python benchmarks/bfloat16.py mobilenet_v2 --batch 2 --rounds 2 --no-compile --against "
        "-o bfloat16_batch.json"),
    "bfloat16_autocast": Made(
        "python benchmarks/bfloat16.py resnet18 mobilenet_v2 --mode autocast --batch 1 8 "
        "--rounds 3 --budget 10 --against -o bfloat16_autocast.json",
        "python benchmarks/bfloat16.py mobilenet_v2 --mode autocast --rounds 2 --no-compile "
        "--against -o bfloat16_autocast.json"),
    "bfloat16_unit": Made(
        "python benchmarks/bfloat16.py resnet18 resnet50 mobilenet_v2 yolov8n vgg16 unet "
        "--rounds 3 --budget 5 -o bfloat16_unit.json",
        "python benchmarks/bfloat16.py mobilenet_v2 --rounds 2 --no-compile --against "
        "-o bfloat16_unit.json"),
    "bfloat16_unit_batch": Made(
        "python benchmarks/bfloat16.py resnet18 mobilenet_v2 --batch 8 --rounds 3 --budget 3 "
        "-o bfloat16_unit_batch.json",
        "python benchmarks/bfloat16.py mobilenet_v2 --batch 2 --rounds 2 --no-compile --against "
        "-o bfloat16_unit_batch.json"),
    "medium": Made(
        "python benchmarks/bfloat16.py resnet18 resnet50 mobilenet_v2 yolov8n vgg16 unet esrgan "
        "efficientnet_b0 deeplabv3 sd_vae --mode medium --rounds 5 --budget 6 -o medium.json",
        "python benchmarks/bfloat16.py mobilenet_v2 --mode medium --rounds 2 --against "
        "-o medium.json"),
    "medium_batch": Made(
        "python benchmarks/bfloat16.py resnet18 resnet50 mobilenet_v2 vgg16 --batch 8 "
        "--mode medium --rounds 5 --budget 3 -o medium_batch.json",
        "python benchmarks/bfloat16.py mobilenet_v2 --mode medium --batch 2 --rounds 2 --against "
        "-o medium_batch.json"),
    "vdpbf16ps": Made("python benchmarks/vdpbf16ps.py -o vdpbf16ps.json",
                      "python benchmarks/vdpbf16ps.py -o vdpbf16ps.json"),
    "zoo_equal": Made("python benchmarks/zoo_equal.py -o zoo_equal.json",
                      "python benchmarks/zoo_equal.py dncnn -o zoo_equal.json"),
    "zoo": Made("python benchmarks/zoo.py --rounds 5 --against onnxruntime openvino -o zoo.json",
                "python benchmarks/zoo.py dncnn --rounds 2 --no-compile -o zoo.json"),
    "gpu_audit": Made("tilewise gpu-audit -o gpu_audit.json",
                      "tilewise gpu-audit --gpu sm_90 --defaults -o gpu_audit.json"),
    "arm": Made("python scripts/emulate_arm.py -o arm.json",
                "python scripts/emulate_arm.py generic --share 0.02 -o arm.json"),
    "arm_debian": Made("python scripts/emulate_debian.py -o arm_debian.json",
                       "python scripts/emulate_debian.py resnet18 -o arm_debian.json"),
    "checked_faults": Made("python scripts/prove_checks.py -o checked_faults.json",
                           "python scripts/prove_checks.py --faults 2 -o checked_faults.json"),
    "faults": Made("python scripts/prove_faults.py -o faults.json",
                   "python scripts/prove_faults.py --kills 12 --files 45 -o faults.json"),
    "networks": Made("tilewise selftest --deep --seeds 0:17 --part networks --row amx "
                     "--row avx512 --row avx2 -o networks.json",
                     "tilewise selftest --deep --seeds 0:1 --part filters --row generic "
                     "-o networks.json"),
    "networks_avx": Made("tilewise selftest --deep --seeds 8:17 --part networks --row avx512 "
                         "--row avx2 --row generic -o networks_avx.json",
                         "tilewise selftest --deep --seeds 0:1 --part filters --row generic "
                         "-o networks_avx.json"),
    "deep": Made("tilewise selftest --deep --seeds 0:16 --part problems -o deep.json && "
                 "tilewise selftest --deep --seeds 0:1 --row amx -o deep.json",
                 "tilewise selftest --deep --seeds 0:1 --part filters --row generic -o deep.json"),
    "torch_versions": Made("python scripts/try_torch.py -o torch_versions.json",
                           "python scripts/try_torch.py --here -o torch_versions.json"),
    "workers": Made("python benchmarks/workers.py --times 1 -o workers.json",
                    "python benchmarks/workers.py --times 1 --model resnet18 -o workers.json"),
    "fleet": Made("python benchmarks/fleet.py --seconds 2 --model resnet18 -o fleet.json",
                  "python benchmarks/fleet.py --seconds 1 --model lenet_b -o fleet.json"),
    "ray_killed": Made(
        "python benchmarks/ray_killed.py --images 2000 --kills 10 -o ray_killed.json",
        "python benchmarks/ray_killed.py --images 400 --kills 1 -o ray_killed.json"),
    "ray_overhead": Made(
        "python benchmarks/ray_overhead.py --images 20000 --rounds 2 -o ray_overhead.json",
        "python benchmarks/ray_overhead.py --images 1000 --rounds 1 -o ray_overhead.json"),
    "stress": Made(
        "python benchmarks/stress.py -o stress.json",
        "python benchmarks/stress.py --forks 20 --threads 8 --processes 3 -o stress.json"),
}


def commands(name: str, quick: bool, into: Path) -> list[list[str]]:
    """The commands as they are run: this interpreter's, writing where they should."""
    whole = MADE[name].quick if quick else MADE[name].command
    return [_arguments(command, name, into) for command in whole.split(" && ")]


def _arguments(command: str, name: str, into: Path) -> list[str]:
    words = [str(into / word) if word == f"{name}.json" else word for word in shlex.split(command)]
    first = [sys.executable, "-m", "tilewise"] if words[0] == "tilewise" else [sys.executable]
    return [*first, *words[1:]]


def make(name: str, quick: bool, into: Path) -> None:
    """Measure, and note the command as readers type it."""
    into.mkdir(parents=True, exist_ok=True)
    for words in commands(name, quick, into):
        subprocess.run(words, check=True, cwd=ROOT)
    path = into / f"{name}.json"
    result = json.loads(path.read_text())
    result["command"] = MADE[name].quick if quick else MADE[name].command
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(MADE))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--into", type=Path, default=RESULTS)
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in MADE]
    if unknown:
        parser.error(f"{', '.join(unknown)}: needs some of {', '.join(MADE)}")
    failed = []
    for name in args.names or MADE:
        print(f"== {name}", flush=True)
        try:
            make(name, args.quick, args.into.resolve())
        except subprocess.CalledProcessError as error:  # one that is missing must not stop the rest
            failed.append(f"{name}: exit code {error.returncode}")
    print("\n".join(failed) or "all made; make figures draws them")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
