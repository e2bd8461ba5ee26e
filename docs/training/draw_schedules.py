"""Draw schedules.png, by hand, with matplotlib: `python -m docs.training.draw_schedules`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from training.config.lr_schedule import ScheduleConfig, learning_rate

STEPS = 1000
# The warm-ups of the Llama systems and of Neuron's are longer here than usual, to be seen.
SYSTEMS = {
    "Mamba, FSDP: a quadratic warm-up, then a cosine to a tenth": [ScheduleConfig()],
    "Llama, FSDP and SMP: a linear warm-up, then any of five\n(warmup 0.1, min_lr 0.05)": [
        ScheduleConfig(name="cosine", warmup=0.1, min_lr=0.05),
        ScheduleConfig(name="linear", warmup=0.1, min_lr=0.05),
        ScheduleConfig(name="exponential", warmup=0.1, min_lr=0.05),
        ScheduleConfig(name="constant", warmup=0.1, min_lr=0.05),
        ScheduleConfig(name="plateau", warmup=0.1, plateau=0.4, min_lr=0.05),
    ],
    "Mamba, Composer: level until near the end, or a cosine": [
        ScheduleConfig(name="wsd"),
        ScheduleConfig(name="cosine-tokens"),
    ],
    "Mamba-2, Neuron: a cosine to zero (warmup_steps 100)": [
        ScheduleConfig(name="cosine-to-zero", warmup_steps=100)
    ],
}


def main() -> None:
    figure = Figure(figsize=(10, 6), layout="constrained")
    steps = range(1, STEPS + 1)
    for axes, (system, configs) in zip(figure.subplots(2, 2).flat, SYSTEMS.items(), strict=True):
        for config in configs:
            rates = [learning_rate(config, step, STEPS, 1.0, 4096) for step in steps]
            axes.plot(steps, rates, label=config.name)
        axes.set_title(system, fontsize="medium")
        axes.set_xlabel(f"step of {STEPS:,}")
        axes.set_ylabel("share of the peak")
        axes.set_ylim(0, 1.05)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize="small")
    figure.savefig(Path(__file__).with_name("schedules.png"), dpi=80)


if __name__ == "__main__":
    main()
