// The recipe: plain structs, each with ONE visit() that names its keys. The parser, `key=value` overrides, the printed
// recipe with origins and `gemtune recipe --help-keys` are all generated from these lists. Knows no Torch.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gemtune {

// Every visit(self, visitor) calls visitor(key, member, help) for each leaf. Choices are strings with their allowed values
// in the help as "a|b|c: …"; validate() rejects others with a suggestion.
struct ModelRecipe {
  std::string path;
  std::string tokenizer;
  template <class Self, class V>
  static void visit(Self& self, V&& v) {
    v("path", self.path, "model folder or hub id");
    v("tokenizer", self.tokenizer, "folder or tokenizer.json; default: the model's");
  }
};

struct DataRecipe {
  std::vector<std::string> train;
  std::vector<std::string> eval;
  std::string image_column;
  std::string system;
  std::string prompt;
  std::string answer;
  std::string image_place = "after";
  std::string loss_on = "answer";
  int64_t max_length = 0;
  std::string on_too_long = "error";
  std::string on_bad_row = "error";
  std::string special_tokens = "text";
  int num_workers = 0;
  template <class Self, class V>
  static void visit(Self& self, V&& v) {
    v("train", self.train, "source or list of sources: .jsonl, .parquet, folder of images with metadata.jsonl or .csv");
    v("eval", self.eval, "held-out source or list of sources");
    v("image_column", self.image_column, "column that holds the picture; default: image, images or file_name");
    v("system", self.system, "template of the system turn over columns, e.g. \"You sell {Category}.\"");
    v("prompt", self.prompt, "template of the user turn; default: the source's own messages");
    v("answer", self.answer, "template of the assistant turn");
    v("image_place", self.image_place, "after|before: where the picture stands in a user turn made from data.prompt");
    v("loss_on", self.loss_on, "answer|last_answer|all: which tokens carry loss (all = everything but padding and image tokens)");
    v("max_length", self.max_length, "longest row in tokens; 0: the model's own limit");
    v("on_too_long", self.on_too_long, "error|skip|shorten: what happens to a longer row (shorten cuts the answer only)");
    v("on_bad_row", self.on_bad_row, "error|skip: what happens when a row breaks a rule");
    v("special_tokens", self.special_tokens, "text|parse|reject: control strings typed in user text");
    v("num_workers", self.num_workers, "threads that read and decode ahead of the step; 0: one a core");
  }
};

struct ImageRecipe {
  std::string alpha = "drop";
  std::string exif = "apply";
  int64_t max_pixels = 178956970;
  template <class Self, class V>
  static void visit(Self& self, V&& v) {
    v("alpha", self.alpha, "drop|white|black: transparency is dropped as the reference does, or laid on a colour");
    v("exif", self.exif, "apply|ignore: EXIF orientation");
    v("max_pixels", self.max_pixels, "larger pictures (width × height) are refused from their header");
  }
};

struct LoraRecipe {
  int rank = 16;
  double alpha = 16;
  double dropout = 0.05;
  bool rslora = false;
  std::string targets = "language";
  int vision_rank = 0;
  double vision_learning_rate = 0;
  std::string train_tables = "none";
  std::string init;
  template <class Self, class V>
  static void visit(Self& self, V&& v) {
    v("rank", self.rank, "rank of the adapters; 0: no adapters, every weight is trained (full fine-tuning)");
    v("alpha", self.alpha, "scale is alpha ÷ rank");
    v("dropout", self.dropout, "dropout on the adapters' input, 0 ≤ p < 1");
    v("rslora", self.rslora, "true: scale is alpha ÷ √rank");
    v("targets", self.targets, "language|vision|all-linear: which towers' linear layers get adapters");
    v("vision_rank", self.vision_rank, "rank in the vision tower; 0: lora.rank");
    v("vision_learning_rate", self.vision_learning_rate, "learning rate of the vision tower's adapters; 0: optim.learning_rate");
    v("train_tables", self.train_tables, "none|tied|untied: also train embed_tokens and lm_head, as one table or two");
    v("init", self.init, "adapter folder to continue from");
  }
};

struct QuantRecipe {
  std::string base = "nf4";
  bool double_quant = true;
  bool vision = false;
  template <class Self, class V>
  static void visit(Self& self, V&& v) {
    v("base", self.base, "nf4|none: how the frozen linear layers are held");
    v("double", self.double_quant, "quantise the block scales too");
    v("vision", self.vision, "true: the vision tower's linear layers too, as the reference does");
  }
};

struct OptimRecipe {
  double learning_rate = 2e-4;
  std::string schedule = "constant";
  double warmup_ratio = 0;
  int64_t warmup_steps = 0;
  double max_grad_norm = 0.3;
  double weight_decay = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  std::string table_dtype = "bf16";
  template <class Self, class V>
  static void visit(Self& self, V&& v) {
    v("learning_rate", self.learning_rate, "peak learning rate of AdamW");
    v("schedule", self.schedule, "constant|linear|cosine: after the warm-up");
    v("warmup_ratio", self.warmup_ratio, "share of all steps that warm up, honoured under every schedule");
    v("warmup_steps", self.warmup_steps, "warm-up in steps; overrides optim.warmup_ratio when above 0");
    v("max_grad_norm", self.max_grad_norm, "gradients are scaled down to this norm; 0: never");
    v("weight_decay", self.weight_decay, "AdamW's decoupled decay, on weights that are no norms or biases");
    v("beta1", self.beta1, "AdamW's first moment decay");
    v("beta2", self.beta2, "AdamW's second moment decay");
    v("eps", self.eps, "AdamW's epsilon");
    v("table_dtype", self.table_dtype, "bf16|fp32: precision of trained tables, their gradients and moments");
  }
};

struct TrainRecipe {
  double epochs = 3;
  int64_t max_steps = 0;
  int micro_batch = 1;
  int accumulation = 4;
  int64_t seed = 42;
  std::string recompute = "auto";
  double memory_gib = 0;
  std::string vision_cache = "memory";
  std::string device = "auto";
  std::string loss_average = "tokens";
  template <class Self, class V>
  static void visit(Self& self, V&& v) {
    v("epochs", self.epochs, "passes over the data");
    v("max_steps", self.max_steps, "stop after this many optimizer steps; 0: train.epochs decides");
    v("micro_batch", self.micro_batch, "rows in one forward pass on each rank");
    v("accumulation", self.accumulation, "forward passes an optimizer step on each rank");
    v("seed", self.seed, "order, adapter initialisation and dropout follow from it alone");
    v("recompute", self.recompute,
      "auto|true|false: run each block again in the backward pass instead of keeping its activations; auto: where a GPU's memory "
      "asks for it");
    v("memory_gib", self.memory_gib, "GPU memory that the run may take; 0: what is free when it starts");
    v("vision_cache", self.vision_cache,
      "memory|disk|none: what a frozen vision tower makes of each picture is kept over epochs; disk: over runs too, in the cache "
      "folder");
    v("device", self.device, "auto|cpu|cuda: cuda when present");
    v("loss_average", self.loss_average,
      "tokens|micro_batches: loss over all target tokens of a step, or the mean of micro-batch means");
  }
};

struct CheckpointRecipe {
  std::string every = "epoch";
  int keep = 3;
  template <class Self, class V>
  static void visit(Self& self, V&& v) {
    v("every", self.every, "epoch|N|never: N = optimizer steps");
    v("keep", self.keep, "newest checkpoints kept; 0: all");
  }
};

struct EvalRecipe {
  std::string every = "never";
  int64_t max_rows = 0;
  int num_samples = 8;
  int max_new_tokens = 128;
  template <class Self, class V>
  static void visit(Self& self, V&& v) {
    v("every", self.every, "epoch|N|never: held-out loss during training; N = optimizer steps");
    v("max_rows", self.max_rows, "held-out rows used; 0: all");
    v("num_samples", self.num_samples, "held-out rows shown with their pictures in the report");
    v("max_new_tokens", self.max_new_tokens, "longest generated answer");
  }
};

struct LoggingRecipe {
  int every = 1;
  bool tensorboard = true;
  template <class Self, class V>
  static void visit(Self& self, V&& v) {
    v("every", self.every, "steps between progress lines (metrics.jsonl has every step)");
    v("tensorboard", self.tensorboard, "write event files to RUN_DIR/tensorboard");
  }
};

struct HubRecipe {
  bool push = false;
  std::string repo_id;
  template <class Self, class V>
  static void visit(Self& self, V&& v) {
    v("push", self.push, "upload final/ to the hub after training");
    v("repo_id", self.repo_id, "hub repository; default: the run's name");
  }
};

struct DistRecipe {
  int nproc = 1;
  int workers = 0;
  double timeout_s = 600;
  template <class Self, class V>
  static void visit(Self& self, V&& v) {
    v("nproc", self.nproc, "local ranks");
    v("workers", self.workers,
      "ranks that train.accumulation is meant for; on fewer, accumulation rises so that a step keeps its rows; 0: as many as "
      "run");
    v("timeout_s", self.timeout_s, "a rank that says nothing for so long is lost");
  }
};

struct OutputRecipe {
  std::string dir;
  template <class Self, class V>
  static void visit(Self& self, V&& v) {
    v("dir", self.dir, "run folder, local or gs://, s3://; default: runs/<recipe name>");
  }
};

struct DebugRecipe {
  bool check_data = true;
  template <class Self, class V>
  static void visit(Self& self, V&& v) {
    v("check_data", self.check_data, "read every row completely before weights load");
  }
};

struct Recipe {
  ModelRecipe model;
  DataRecipe data;
  ImageRecipe image;
  LoraRecipe lora;
  QuantRecipe quant;
  OptimRecipe optim;
  TrainRecipe train;
  CheckpointRecipe checkpoint;
  EvalRecipe eval;
  LoggingRecipe logging;
  HubRecipe hub;
  DistRecipe dist;
  OutputRecipe output;
  DebugRecipe debug;

  template <class Self, class V>
  static void visit(Self& self, V&& v) {
    v("model", self.model);
    v("data", self.data);
    v("image", self.image);
    v("lora", self.lora);
    v("quant", self.quant);
    v("optim", self.optim);
    v("train", self.train);
    v("checkpoint", self.checkpoint);
    v("eval", self.eval);
    v("logging", self.logging);
    v("hub", self.hub);
    v("dist", self.dist);
    v("output", self.output);
    v("debug", self.debug);
  }
};

// A recipe with where each value came from.
struct ResolvedRecipe {
  Recipe recipe;
  std::string file;                           // "" = none (defaults and flags only)
  std::map<std::string, std::string> origin;  // "lora.rank" → "default" | "tutorial.yaml:14" | "command line" | "--lora_r"
};

struct RecipeArguments {
  std::string file;                                                 // YAML file or ""
  std::vector<std::string> overrides;                               // "lora.rank=8"
  std::vector<std::pair<std::string, std::string>> tutorial_flags;  // {"--lora_r", "8"}, {"--push_to_hub", ""}
};

// Reads, overrides, resolves, fills derived defaults (output.dir) and validates. Tutorial flags without a file start from
// recipes/tutorial.yaml's values. model.path, model.tokenizer, data.train, data.eval and lora.init become absolute paths: those
// of the file are relative to its folder, others to the current one; hub ids (ORG/NAME that is no such folder) and URIs stay.
// Throws Error(kInput) with every complaint, each "FILE:LINE: key: …; did you mean …?", one a line.
ResolvedRecipe load_recipe(const RecipeArguments& arguments);

// One leaf of the catalogue.
struct KeyHelp {
  std::string key;  // "lora.rank"
  std::string default_value;
  std::string help;
};
std::vector<KeyHelp> recipe_keys();

// YAML text that load_recipe reads back to the same values; stored in every run and checkpoint.
std::string to_yaml(const Recipe& recipe);
// For people: "lora.rank  16  (default)" lines.
std::string describe(const ResolvedRecipe& resolved);

// Keys (with both values) in which two recipes differ, leaving out those a resumed run may change: train.epochs,
// train.max_steps, train.vision_cache, dist.nproc, logging.*, checkpoint.keep, and output.dir, which names the run's folder
// itself.
std::vector<std::string> differences_that_forbid_resume(const Recipe& stored, const Recipe& now);

// The tutorial script's flags in its own spelling, with the recipe key each sets ("" = handled specially).
struct TutorialFlag {
  std::string flag;
  bool takes_value;
  std::string key;
  std::string help;
};
const std::vector<TutorialFlag>& tutorial_flags();

// Texts of docs/recipes.md and recipes/full.yaml, made from the lists above.
std::string recipe_document();
std::string full_recipe();

}  // namespace gemtune
