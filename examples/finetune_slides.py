"""Fine-tune a slide encoder on the labels of slides, by the published recipe.

    python examples/finetune_slides.py --weights slide_encoder.safetensors --features features/ --labels labels.csv

Each line of the labels is ``slide,class``, and features/slide.pt holds {"features": (L, C), "coords": (L, 2)}. Without
arguments it trains a small encoder on slides made up of noise: a test of the loop, not of the model.
"""

import argparse
import csv
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention.models import SlideEncoder, finetuning


class Classifier(nn.Module):
    def __init__(self, encoder: SlideEncoder, classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(encoder.embed_dim, classes)

    def forward(self, tiles: Tensor, coords: Tensor) -> Tensor:
        layers = self.encoder(tiles, coords, all_layer_embed=True)
        return self.head(layers[min(11, self.encoder.depth)])  # of 12: the published choice


def train(model: Classifier, slides: list[tuple[Tensor, Tensor, int]], epochs: int, accumulation: int) -> float:
    """The mean loss of the last epoch."""
    device = model.head.weight.device
    model.encoder.checkpoint_activations = True  # 12 times less memory, for a third more time
    optimizer, schedule = finetuning(model, max(1, len(slides) // accumulation), epochs=epochs)
    for epoch in range(epochs):
        total = 0.0
        for index, (tiles, coords, label) in enumerate(random.sample(slides, len(slides)), start=1):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(tiles.to(device).unsqueeze(0), coords.unsqueeze(0))
            loss = F.cross_entropy(logits.float(), torch.tensor([label], device=device))
            (loss / accumulation).backward()
            total += loss.item()
            if index % accumulation == 0:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {total / len(slides):.4f}")
    return total / len(slides)


def noise(count: int = 64, tiles: int = 40, channels: int = 16) -> list[tuple[Tensor, Tensor, int]]:
    """Slides of two classes that differ in the mean of one channel."""
    shift, places = 2.0 * F.one_hot(torch.tensor(0), channels), torch.randint(0, 100, (count, tiles, 2)) * 256
    return [(torch.randn(tiles, channels) + i % 2 * shift, place, i % 2) for i, place in enumerate(places)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="a file, a folder or a hub id")
    parser.add_argument("--features", type=Path, help="a folder with slide.pt for each slide")
    parser.add_argument("--labels", type=Path, help="a file of lines: slide,class")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    recipe = {"dropout": 0.1, "drop_path_rate": 0.0, "global_pool": False}
    if options.weights is None:
        encoder, slides, accumulation = SlideEncoder(16, 32, 2, 4, **recipe), noise(), 4
    else:
        encoder = SlideEncoder.from_pretrained(options.weights, max_wsi_size=250000, **recipe)
        labels, accumulation = dict(csv.reader(options.labels.open(newline=""))), 32
        read = {name: torch.load(options.features / f"{name}.pt", weights_only=True) for name in labels}
        slides = [(file["features"], file["coords"], int(labels[name])) for name, file in read.items()]
    model = Classifier(encoder, 1 + max(label for _, _, label in slides)).train()
    train(model.to("cuda" if torch.cuda.is_available() else "cpu"), slides, options.epochs, accumulation)


if __name__ == "__main__":
    main()
