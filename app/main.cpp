// gemtune: the command line. Parses, runs one sub-command, turns an Error into its exit code.
#include "app/commands.h"
#include "app/gke.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <csignal>
#include <cstdio>

namespace gemtune {

std::atomic<int> g_stop_signal{0};

namespace {

void on_signal(int number) {
  if (g_stop_signal.exchange(number) != 0) std::_Exit(128 + number);  // asked twice: at once
}

void add_recipe(CLI::App* command, RecipeWords& recipe) {
  command->add_option("RECIPE", recipe.words, "recipe.yaml and key=value settings, in any order")
      ->option_text("RECIPE.yaml [key=value …]");
}

// "; did you mean train?" for the word the parser stumbled over: an unknown sub-command or flag.
std::string suggestion(const CLI::App& app, const std::vector<std::string>& words) {
  const CLI::App* at = &app;
  while (!at->get_subcommands().empty()) at = at->get_subcommands().front();
  std::vector<std::string> known;
  for (const CLI::App* sub : at->get_subcommands([](const CLI::App*) { return true; })) known.push_back(sub->get_name());
  for (const CLI::Option* option : at->get_options()) {
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  }
  for (const std::string& word : words) {
    const std::string bare = word.starts_with("--") ? word.substr(0, word.find('=')) : word;
    const bool could_be_meant = word.starts_with("--") || at->get_subcommands().empty();
    if (!could_be_meant || std::find(known.begin(), known.end(), bare) != known.end()) continue;
    const std::string near = did_you_mean(bare, known);
    if (!near.empty()) return fmt::format("; {}: did you mean {}?", bare, near);
  }
  return "";
}

int run(int argc, char** argv) {
  CLI::App app{"Fine-tunes Google's Gemma 3 vision-language models on your own images.", "gemtune"};
  app.set_version_flag("--version", std::string("gemtune ") + GEMTUNE_VERSION);
  app.require_subcommand(1);
  std::function<int()> action;

  TrainCommand train;
  train.argv.assign(argv, argv + argc);
  CLI::App* command = app.add_subcommand("train", "fine-tune; goes on by itself where an interrupted run stopped");
  add_recipe(command, train.recipe);
  command->add_option("--nproc", train.nproc, "local ranks (dist.nproc)")->check(CLI::PositiveNumber);
  command->add_option("--events", train.events, "write one JSON object a line to this file descriptor or path");
  command->add_flag("--fresh", train.fresh, "begin a new sibling folder even if output.dir holds this run");
  for (size_t i = 0; i < tutorial_flags().size(); ++i) {
    const TutorialFlag& flag = tutorial_flags()[i];
    const auto remember = [&train, name = flag.flag](const std::string& value) {
      train.recipe.tutorial_flags.emplace_back(name, value);
    };
    CLI::Option* option = flag.takes_value ? command->add_option_function<std::string>(flag.flag, remember, flag.help)
                                           : command->add_flag_callback(
                                                 flag.flag, [remember] { remember(""); }, flag.help);
    option->group("The tutorial script's own arguments");
  }
  command->callback([&] { action = [&] { return run_train(train); }; });

  InspectCommand inspect;
  command = app.add_subcommand("inspect", "what the model sees of one row");
  add_recipe(command, inspect.recipe);
  command->add_option("--row", inspect.row, "row, from 0")->check(CLI::NonNegativeNumber);
  command->add_option("--out", inspect.out, "folder for the pictures as preprocessed (PNG)");
  command->add_flag("--json", inspect.json, "one JSON document on stdout");
  command->callback([&] { action = [&] { return run_inspect(inspect); }; });

  DataCommand data;
  CLI::App* data_app = app.add_subcommand("data", "look at a recipe's data before training");
  data_app->require_subcommand(1);
  command = data_app->add_subcommand("check", "read every row and report every bad one");
  add_recipe(command, data.recipe);
  command->add_flag("--json", data.json, "one JSON document on stdout");
  command->callback([&] { action = [&] { return run_data_check(data); }; });
  command = data_app->add_subcommand("preview", "the first rows as the model sees them");
  add_recipe(command, data.recipe);
  command->add_option("--rows", data.num_rows, "how many")->check(CLI::PositiveNumber);
  command->callback([&] { action = [&] { return run_data_preview(data); }; });

  PlanCommand plan;
  command = app.add_subcommand("plan", "parameters, memory, time and price, before anything is loaded");
  add_recipe(command, plan.recipe);
  command->add_option("--gpu", plan.gpu, "GPU it is planned for: h200, h100, b200, a100-80, a100-40, l4, rtx-4090")
      ->capture_default_str();
  command->add_option("--gpus", plan.gpus, "your own table of GPUs and prices, in the form of recipes/gpus.yaml");
  command->add_flag("--json", plan.json, "one JSON document on stdout");
  command->callback([&] { action = [&] { return run_plan(plan); }; });

  GenerateCommand generate;
  command = app.add_subcommand("generate", "answer a prompt about an image");
  command->add_option("--model", generate.model, "model folder")->required();
  command->add_option("--adapter", generate.adapter, "adapter folder");
  command->add_option("--image", generate.images, "image file; several may be given, in order");
  command->add_option("--prompt", generate.prompt, "the user's text")->required();
  command->add_option("--system", generate.system, "system text");
  command->add_option("--quant", generate.quant, "hold the frozen linear layers as while training")
      ->check(CLI::IsMember({"none", "nf4"}));
  command->add_option("--max-new-tokens", generate.max_new_tokens, "longest answer")->check(CLI::PositiveNumber);
  command->add_option("--temperature", generate.temperature, "0: greedy")->check(CLI::NonNegativeNumber);
  command->add_option("--top-k", generate.top_k, "sample among the k likeliest; 0: all")->check(CLI::NonNegativeNumber);
  command->add_option("--top-p", generate.top_p, "sample among the likeliest with this mass")->check(CLI::Range(0.0, 1.0));
  command->add_option("--seed", generate.seed, "of the sampling");
  command->callback([&] { action = [&] { return run_generate(generate); }; });

  EvalCommand eval;
  command = app.add_subcommand("eval", "score a checkpoint on held-out rows");
  add_recipe(command, eval.recipe);
  command->add_option("--checkpoint", eval.checkpoint, "adapter or model folder; default: the base model alone");
  command->add_flag("--compare-base", eval.compare_base, "score the base model too, and show answers before and after");
  command->add_flag("--json", eval.json, "one JSON document on stdout");
  command->callback([&] { action = [&] { return run_eval(eval); }; });

  MergeCommand merge;
  command = app.add_subcommand("merge", "add an adapter to its base: a model folder that opens alone");
  command->add_option("--model", merge.model, "the model that was trained on, in its original precision")->required();
  command->add_option("--adapter", merge.adapter, "adapter folder")->required();
  command->add_option("--out", merge.out, "folder to make")->required();
  command->add_option("--onto", merge.onto, "the original weights, or what a 4-bit run saw of them (NF4 and back)")
      ->check(CLI::IsMember({"original", "nf4"}));
  command->add_option("--rows", merge.num_rows, "rows on which live and merged model are compared; 0: none")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--max-gap", merge.max_gap, "largest difference allowed, as a share of the largest logit")
      ->check(CLI::NonNegativeNumber);
  command->callback([&] { action = [&] { return run_merge(merge); }; });

  MakeModelCommand make_model;
  bool random_weights = false;
  command = app.add_subcommand("make-model", "a folder of true shapes with random weights, for benchmarks and tests");
  command->add_option("--like", make_model.like, "tiny, 270m, 1b, 4b, 12b, 27b, or a folder whose config.json is used")
      ->required();
  command->add_flag("--random-weights", random_weights, "said aloud: the weights are random")->required();
  command->add_option("--tokenizer", make_model.tokenizer, "folder whose tokenizer and processor files are copied");
  command->add_option("--out", make_model.out, "folder to make")->required();
  command->add_option("--seed", make_model.seed, "of the random weights");
  command->callback([&] { action = [&] { return run_make_model(make_model); }; });

  ReportCommand report;
  command = app.add_subcommand("report", "write RUN_DIR/report.html: curves, settings, samples");
  command->add_option("RUN_DIR", report.run_dir, "a run's folder")->required();
  command->callback([&] { action = [&] { return run_report(report); }; });

  command = app.add_subcommand("recipe", "about recipes");
  bool help_keys = false;
  command->add_flag("--help-keys", help_keys, "every key with its meaning and default")->required();
  command->callback([&] { action = [] { return run_recipe_help(); }; });

  command = app.add_subcommand("doctor", "look at this machine: GPU, disk, libraries, operations");
  command->callback([&] { action = [] { return run_doctor(); }; });

  app.add_subcommand("gke", "the whole tutorial around the job on Google Kubernetes Engine: `gemtune gke --help`");

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {
    return app.exit(asked);  // --help, --version
  } catch (const CLI::ParseError& error) {
    throw input_error("{}{}; `gemtune --help` lists commands and flags", error.what(),
                      suggestion(app, std::vector<std::string>(argv + 1, argv + argc)));
  }
  std::signal(SIGTERM, on_signal);
  std::signal(SIGINT, on_signal);
  return action();
}

}  // namespace
}  // namespace gemtune

int main(int argc, char** argv) {
  try {
    if (argc > 1 && std::string_view(argv[1]) == "gke") return gemtune::run_gke(argc, argv);
    return gemtune::run(argc, argv);
  } catch (const gemtune::Error& error) {
    gemtune::log_line(gemtune::LogLevel::kError, error.what());
    return int(error.code());
  } catch (const std::exception& error) {
    gemtune::log_line(gemtune::LogLevel::kError, error.what());
    return int(gemtune::ExitCode::kJobFailed);
  }
}
