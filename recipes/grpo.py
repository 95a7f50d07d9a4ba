"""Train a causal language model with rewards that a program can check, by trl's GRPOTrainer.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --num_processes 8 recipes/grpo.py \\
        --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct --dataset_name trl-lib/DeepMath-103K --rewards accuracy_reward

    accelerate launch --config_file accelerate_configs/ddp.yaml --mixed_precision no recipes/grpo.py \\
        --config recipes/configs/grpo/arithmetic.yaml

A row has a `prompt`, a text or a list of messages; its other columns go to the rewards. For each prompt of a step, the model
draws `--num_generations` answers. Answers that earn more than the mean of their group become more likely. `--rewards` runs
code: each FILE.py:FUNCTION is loaded as a program of yours (docs/grpo.md). Before and after training, the same rewards
score answers to held-out prompts: the most likely answers, and drawn ones.
"""

from dataclasses import dataclass

import trl

from accelerate_recipes.args import arg
from accelerate_recipes.conversations.answers import GRPOArgs, answers_trial, give_model_to_trl, rows_of_prompts
from accelerate_recipes.conversations.chats import ChatArgs
from accelerate_recipes.conversations.prompts import HeldoutAnswers, clean_prompts, end_of_prompt, load_prompts
from accelerate_recipes.conversations.rewards import load_rewards, reward_problems, tell_of_rewards
from accelerate_recipes.conversations.settings import make_model, trl_config
from accelerate_recipes.conversations.trained_rows import compare_finished
from accelerate_recipes.conversations.whole_steps import WholeSteps, num_whole_steps
from accelerate_recipes.engine import train
from accelerate_recipes.life.picture import Bars, Curves
from accelerate_recipes.models.adapters import add_adapters
from accelerate_recipes.models.generation import Sampling
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.ranks import local_main_process_first
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.report.samples import Samples
from accelerate_recipes.run import Result, before_and_after, finish, start
from accelerate_recipes.trial import Trial


@dataclass
class Args(ChatArgs, GRPOArgs, trl.GRPOConfig):
    output_dir: str = "outputs/grpo"
    tokenizes_first = True
    rewards: list[str] = arg(
        [],
        "Rewards: my_rewards.py:function, whose code is run; accuracy_reward; think_format_reward.",
        fixed=False,
        group="essential",
    )
    num_eval_prompts: int = arg(256, "Held-out prompts answered in each evaluation; 0: all.", fixed=False, min=0)
    num_samples: int = arg(8, "Number of answers that samples.html shows for a logged step.", fixed=False, min=0)

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size) + reward_problems(self.rewards, self.elsewhere)
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            found.append(
                f"--reward_weights has {len(self.reward_weights)} numbers, --rewards {len(self.rewards)} names"
            )
        return found


def requirements(args: Args) -> Requirements:
    return Requirements(models=[args.model_name_or_path], datasets=args.row_datasets)


def trial(args: Args) -> Trial:
    return answers_trial(args)


def main(args: Args) -> None:
    run = start(args)

    # Tokenizer, model and data
    tokenizer = load_tokenizer(args.model_name_or_path)
    args.settle_date(tokenizer)
    model = make_model(args)
    rows, counts = local_main_process_first(lambda: load_prompts(args, tokenizer, model))
    columns = [name for name in rows["train"].column_names if name in rows["test"].column_names]
    begin = end_of_prompt(tokenizer, rows["test"][0]["prompt"], args.template_settings)
    rewards = load_rewards(args.rewards, columns, begin, tokenizer)
    heldout = rows["test"].select(range(min(len(rows["test"]), args.num_eval_prompts or len(rows["test"]))))
    tell_of_rewards(run, tokenizer, {"train": rows["train"], "evaluate": heldout}, rewards)
    prompts, shown = clean_prompts(run, {"train": rows["train"], "test": heldout}, tokenizer).values()

    # Trainer, which draws and scores answers
    run.adapter = add_adapters(model, args)
    config, given = trl_config(run, trl.GRPOConfig), {"reward_funcs": rewards, "train_dataset": prompts}
    trainer = give_model_to_trl(run, config, model, tokenizer, **given)
    read = rows_of_prompts(trainer, prompts, shown)
    trainer.compare(prompts)
    run.show_rows(tokenizer, read.first, len(prompts), counts)
    trainer.samples = Samples(run.output_dir, run.resumed_from) if run.is_first else None
    answers = HeldoutAnswers(run, tokenizer, heldout, rewards, trainer.samples)
    run.print(
        f"Data: {len(rows['train']):,} prompts to answer, {len(rows['test']):,} held out, of which {len(heldout):,} are "
        f"answered in an evaluation; {args.num_generations} answers of {args.max_completion_length} tokens at most to "
        f"each of {args.total_batch_size // args.num_generations} prompts a step"
    )

    # Training and evaluation
    run.prepare(model, tokenizer, num_whole_steps(args, len(prompts)))
    trainer.use_sharded_model()
    trainer.add_reference()
    loader = read.make_loader(order_class=WholeSteps)

    def evaluate_fn(step: int) -> dict[str, float]:
        drawn = answers.evaluate(step, Sampling(args.temperature, args.seed, settings=args.sampling))
        return answers.evaluate(step) | {f"sampled_{name}": value for name, value in drawn.items()}

    loss_fn, count_fn, draw_fn = trainer.sum_and_count, trainer.count_parts, trainer.draw
    functions = {"draw_fn": draw_fn, "values_fn": trainer.values, "mark_fn": trainer.mark, "by_norm_alone": True}
    records = train(run, loader, loss_fn=loss_fn, count_fn=count_fn, evaluate_fn=evaluate_fn, **functions)

    # Result
    def result(before: dict, after: dict) -> Result:
        bars = {
            when: {"most likely answers": values["eval_reward"], "drawn answers": values["eval_sampled_reward"]}
            for when, values in (("before", before), ("after", after))
        }
        curves = [
            Curves(
                {"training": "reward", "held out": "eval_reward", "held out, drawn": "eval_sampled_reward"}, "Reward"
            ),
            Curves({"training": "completions/mean_length", "held out": "eval_length"}, "Tokens of an answer"),
            Curves({"training": "kl"}, "KL divergence from the first model"),
        ]
        return Result(before_and_after(before, after).text, Bars(bars, "Answers to held-out prompts", "reward"), curves)

    description = f"{args.model_name_or_path}, trained by GRPO with {', '.join(r.__name__ for r in rewards)}"
    finish(run, records, f"{description} on prompts of {args.source}.", result)
    compare_finished(run)
    if trainer.samples:
        run.print(f"Answers by step: {trainer.samples.page}")


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
