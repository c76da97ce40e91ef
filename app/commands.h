// The sub-commands, one function each; main.cpp parses, these act. Each returns the process's exit code or throws Error.
#pragma once

#include "recipe/recipe.h"

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace gemtune {

// Set by SIGTERM and SIGINT to the signal's number.
extern std::atomic<int> g_stop_signal;

// What is common to commands that take a recipe: RECIPE.yaml and key=value in any order.
struct RecipeWords {
  std::vector<std::string> words;                                   // as typed
  std::vector<std::pair<std::string, std::string>> tutorial_flags;  // `train` only
  ResolvedRecipe load() const;
};

struct TrainCommand {
  RecipeWords recipe;
  std::string events;
  bool fresh = false;
  int nproc = 0;                  // 0: dist.nproc
  std::vector<std::string> argv;  // to start local ranks with
};
int run_train(const TrainCommand& command);

struct InspectCommand {
  RecipeWords recipe;
  int64_t row = 0;
  std::string out;  // folder for the preprocessed pictures
  bool json = false;
};
int run_inspect(const InspectCommand& command);

struct DataCommand {
  RecipeWords recipe;
  bool json = false;
  int64_t num_rows = 3;  // preview
};
int run_data_check(const DataCommand& command);
int run_data_preview(const DataCommand& command);

struct PlanCommand {
  RecipeWords recipe;
  std::string gpu = "h200";
  std::string gpus;  // table of GPUs and prices; "" = recipes/gpus.yaml
  bool json = false;
};
int run_plan(const PlanCommand& command);

struct GenerateCommand {
  std::string model;
  std::string adapter;
  std::vector<std::string> images;
  std::string prompt;
  std::string system;
  std::string quant = "none";  // none|nf4, as the base was quantised while training
  int64_t max_new_tokens = 128;
  double temperature = 0;
  int64_t top_k = 0;
  double top_p = 1;
  uint64_t seed = 42;
};
int run_generate(const GenerateCommand& command);

struct EvalCommand {
  RecipeWords recipe;
  std::string checkpoint;     // adapter or model folder; "" = the base alone
  bool compare_base = false;  // score the base too, and keep samples of both
  bool json = false;
};
int run_eval(const EvalCommand& command);

struct MergeCommand {
  std::string model;
  std::string adapter;
  std::string out;
  std::string onto = "original";  // original|nf4: the base's weights, or what a 4-bit run saw of them
  int num_rows = 8;               // whose logits are compared; 0: none
  double max_gap = 0.05;          // of the largest logit
};
int run_merge(const MergeCommand& command);

struct MakeModelCommand {
  std::string like;
  std::string tokenizer;  // folder whose tokenizer and processor files are copied
  std::string out;
  uint64_t seed = 42;
};
int run_make_model(const MakeModelCommand& command);

struct ReportCommand {
  std::string run_dir;
};
int run_report(const ReportCommand& command);

int run_recipe_help();
int run_doctor();

}  // namespace gemtune
