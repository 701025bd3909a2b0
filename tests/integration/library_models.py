"""Models that nobody here wrote, each with a fault that people meet; the environment variable FIXED mends them all."""

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F

BAD = 2
FIXED = "FIXED" in os.environ


def at_least_one(count: torch.Tensor) -> torch.Tensor:
    return count.clamp(min=1) if FIXED else count


class Base(pl.LightningModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Encoder(Base):
    """BERT, its outputs averaged over the tokens of interest, of which a sample may have none."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        self.model = BertModel(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.model(input_ids=batch["input_ids"]).last_hidden_state
        chosen = batch["chosen"].unsqueeze(-1)
        return ((hidden * chosen).sum(1) / at_least_one(chosen.sum(1))).pow(2).mean()

    @staticmethod
    def batches() -> Iterator[Any]:
        from transformers import BatchEncoding

        for i in range(4):
            chosen = torch.ones(3, 8)
            chosen[1] = float(i != BAD)
            yield BatchEncoding({"input_ids": torch.randint(0, 50, (3, 8)), "chosen": chosen})


class Decoder(Base):
    """GPT-2, its loss averaged over supervised tokens, of which a batch may have none."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.model(input_ids=batch["ids"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / at_least_one((labels != -100).sum()) + 1e-3 * logits.pow(2).mean()

    @staticmethod
    def batches() -> Iterator[Any]:
        for i in range(4):
            ids = torch.randint(0, 50, (2, 8))
            yield {"ids": ids, "labels": torch.full_like(ids, -100) if i == BAD else ids}


class EncoderDecoder(Base):
    """T5 with its own loss, which is a mean over targets that may all be ignored."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        self.model = T5ForConditionalGeneration(T5Config(vocab_size=50, decoder_start_token_id=0, **sizes))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids, labels = batch
        out = self.model(input_ids=ids, labels=labels)
        if FIXED and bool((labels == -100).all()):
            return 1e-3 * out.logits.pow(2).mean()
        return out.loss + 1e-3 * out.logits.pow(2).mean()

    @staticmethod
    def batches() -> Iterator[Any]:
        for i in range(4):
            labels = torch.randint(1, 50, (2, 5))
            yield torch.randint(1, 50, (2, 7)), torch.full_like(labels, -100) if i == BAD else labels


class Diffusion(Base):
    """A UNet of diffusers, its loss weighted by the inverse of a signal-to-noise ratio that ends at 0."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import UNet2DModel

        self.model = UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=4,
            attention_head_dim=4,
            layers_per_block=1,
        )
        self.register_buffer("alpha", torch.linspace(0.99, 0.0, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, last = batch
        t = torch.randint(0, 9, (len(x),)) if not last else torch.full((len(x),), 9)
        alpha = self.alpha[t].view(-1, 1, 1, 1)
        noise = torch.randn_like(x)
        error = (self.model(alpha.sqrt() * x + (1 - alpha).sqrt() * noise, t).sample - noise).pow(2).mean((1, 2, 3))
        ratio = self.alpha[t] / (1 - self.alpha[t])
        return (error * ratio.clamp(max=5) / (ratio + 1 if FIXED else ratio)).mean() + 1e-3 * error.mean()

    @staticmethod
    def batches() -> Iterator[Any]:
        for i in range(4):
            yield torch.rand(2, 1, 8, 8), i == BAD


class Graphs(Base):
    """A graph attention network of torch_geometric, pooled by the degree of nodes, one of which has no edge."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv

        self.conv, self.out = GATConv(3, 8, heads=2), nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        from torch_geometric.nn import global_add_pool
        from torch_geometric.utils import degree

        h = torch.tanh(self.conv(batch.x, batch.edge_index))
        weight = at_least_one(degree(batch.edge_index[0], batch.num_nodes)).rsqrt().unsqueeze(-1)
        return F.mse_loss(self.out(global_add_pool(h * weight, batch.batch)).squeeze(-1), batch.y)

    @staticmethod
    def batches() -> Iterator[Any]:
        from torch_geometric.data import Batch, Data

        for i in range(4):
            ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
            open_ring = ring[:, :3] if i == BAD else ring
            graphs = [Data(x=torch.randn(4, 3), edge_index=edges, y=torch.randn(1)) for edges in (ring, open_ring)]
            yield Batch.from_data_list(graphs)


class Gaussian(pl.LightningModule):
    """An exact GP of gpytorch under LBFGS, its targets standardised by a deviation that may be 0."""

    def __init__(self) -> None:
        super().__init__()
        import gpytorch

        class Model(gpytorch.models.ExactGP):
            def __init__(self, likelihood: Any) -> None:
                super().__init__(None, None, likelihood)
                self.mean = gpytorch.means.ConstantMean()
                self.covariance = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

            def forward(self, x: torch.Tensor) -> Any:
                return gpytorch.distributions.MultivariateNormal(self.mean(x), self.covariance(x))

        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.model = Model(self.likelihood)
        self.mll = gpytorch.mlls.ExactMarginalLogLikelihood(self.likelihood, self.model)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        spread = y.std().clamp(min=1e-6) if FIXED else y.std()
        y = (y - y.mean()) / spread
        self.model.set_train_data(x, y, strict=False)
        return -self.mll(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    @staticmethod
    def batches() -> Iterator[Any]:
        for i in range(4):
            yield torch.rand(6, 1), torch.ones(6) if i == BAD else torch.randn(6)


class Speech(Base):
    """An LSTM with CTC, whose loss is infinite where the target is longer than the clip."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 5)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        packed, targets, lengths = batch
        h, sizes = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        logp = self.out(h).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logp, targets, sizes, lengths, zero_infinity=FIXED)

    @staticmethod
    def batches() -> Iterator[Any]:
        for i in range(4):
            clips = [torch.randn(n, 4) for n in (9, 2 if i == BAD else 7)]
            packed = nn.utils.rnn.pack_sequence(clips)
            yield packed, torch.randint(1, 5, (2, 4)), torch.tensor([4, 4])


class Layers(Base):
    """torch's own transformer encoder, averaged over what is no padding, of which a sequence may have nothing."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, padding = batch["x"], batch["padding"]
        h = self.model(x, src_key_padding_mask=padding)
        seen = (~padding).unsqueeze(-1)
        return ((h * seen).sum(1) / at_least_one(seen.sum(1))).pow(2).mean()

    @staticmethod
    def batches() -> Iterator[Any]:
        for i in range(4):
            padding = torch.zeros(3, 5, dtype=torch.bool)
            padding[1, 3:] = True
            padding[2] = i == BAD
            yield {"x": torch.randn(3, 5, 8), "padding": padding}


MODELS = (Encoder, Decoder, EncoderDecoder, Diffusion, Graphs, Gaussian, Speech, Layers)
