#include "recipe/leaves.h"

namespace gemtune {

// The one source of these values; recipes/tutorial.yaml is this text, and a test compares them.
const char* const kTutorialYaml =
    R"yaml(# Product descriptions from pictures: the job of the tutorial "Fine-tune Gemma 3 for vision tasks with Ray on GKE", with its own
# numbers. Also what `gemtune train --gcs_bucket BUCKET` runs without a file; each of the script's arguments acts on it.

model:
  path: google/gemma-3-4b-it # --model_id

data:
  train: philschmid/amazon-product-descriptions-vlm # --dataset_name
  image_column: image
  image_place: after
  system: You are an expert product description writer for Amazon.
  prompt: |
    Create a Short Product description based on the provided <PRODUCT> and <CATEGORY> and image.
    Only return description. The description should be SEO optimized and for a better mobile search experience.

    <PRODUCT>
    {Product Name}
    </PRODUCT>

    <CATEGORY>
    {Category}
    </CATEGORY>
  answer: "{description}"
  loss_on: all # everything but padding and image tokens
  max_length: 0 # the script parses --max_seq_length and never uses it; here it acts when it is given

image:
  exif: ignore

lora:
  rank: 16 # --lora_r
  alpha: 16 # --lora_alpha
  dropout: 0.05 # --lora_dropout
  targets: all-linear # both towers
  train_tables: untied # lm_head and embed_tokens, two tables

quant:
  base: nf4
  double: true
  vision: true

optim:
  learning_rate: 2e-4 # --learning_rate
  schedule: constant
  warmup_ratio: 0 # the script's 0.03 has no effect under its constant schedule
  max_grad_norm: 0.3
  weight_decay: 0

train:
  epochs: 3 # --num_train_epochs
  micro_batch: 1 # --per_device_train_batch_size
  accumulation: 4 # --gradient_accumulation_steps

dist:
  nproc: 1 # local ranks; a launcher sets the world size by RANK, WORLD_SIZE, LOCAL_RANK
  workers: 16 # the tutorial's 16 GPUs: a step keeps its 64 rows on any number of them

checkpoint:
  every: epoch # --save_strategy epoch|steps|no, --save_steps

logging:
  every: 10 # --logging_steps
  tensorboard: true

hub:
  push: false # --push_to_hub

output:
  dir: runs/gemma-3-4b-seo-optimized # --output_dir; with --gcs_bucket B: gs://B/gemma-3-4b-seo-optimized
)yaml";

const std::vector<TutorialFlag>& tutorial_flags() {
  static const std::vector<TutorialFlag> flags = {
      {"--model_id", true, "model.path", "model folder or hub id"},
      {"--dataset_name", true, "data.train", "data set: file, folder or hub id"},
      {"--output_dir", true, "", "output.dir; with --gcs_bucket, the run's name in the bucket"},
      {"--gcs_bucket", true, "", "output.dir becomes gs://BUCKET/NAME of --output_dir; gs:// may lead"},
      {"--push_to_hub", false, "hub.push", "upload the final adapter to the hub"},
      {"--lora_r", true, "lora.rank", "rank of the adapters"},
      {"--lora_alpha", true, "lora.alpha", "scale is alpha ÷ rank"},
      {"--lora_dropout", true, "lora.dropout", "dropout on the adapters' input"},
      {"--max_seq_length", true, "data.max_length", "longest row in tokens; acts only when given, then data.on_too_long decides"},
      {"--num_train_epochs", true, "train.epochs", "passes over the data"},
      {"--per_device_train_batch_size", true, "train.micro_batch", "rows in one forward pass on each rank"},
      {"--gradient_accumulation_steps", true, "train.accumulation", "forward passes an optimizer step on each rank"},
      {"--learning_rate", true, "optim.learning_rate", "learning rate of AdamW"},
      {"--logging_steps", true, "logging.every", "steps between progress lines"},
      {"--save_strategy", true, "", "epoch|steps|no: checkpoint.every; steps takes --save_steps (default 100)"},
      {"--save_steps", true, "", "checkpoint.every in steps; needs --save_strategy steps"},
  };
  return flags;
}

}  // namespace gemtune
