#include "recipe/recipe.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "recipe/leaves.h"

namespace gemtune {
namespace {

using Flags = std::vector<std::pair<std::string, std::string>>;

// A folder that is also the current one while the test runs, with a recipe in sub/.
class RecipeFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "gemtune_recipe_XXXXXX";
    folder_ = std::filesystem::canonical(::mkdtemp(pattern.data())).string();
    before_ = std::filesystem::current_path().string();
    std::filesystem::current_path(folder_);
    make_folders("sub");
  }
  void TearDown() override {
    std::filesystem::current_path(before_);
    remove_recursively(folder_);
  }

  // The recipe sub/my.yaml with `yaml` in it.
  ResolvedRecipe load(const std::string& yaml, const std::vector<std::string>& overrides = {}, const Flags& flags = {}) {
    write_file_atomically("sub/my.yaml", yaml);
    return load_recipe({"sub/my.yaml", overrides, flags});
  }

  std::string error_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kInput);
      return error.what();
    }
    return "no error";
  }
  std::string complaints(const std::string& yaml, const std::vector<std::string>& overrides = {}, const Flags& flags = {}) {
    return error_of([&] { load(yaml, overrides, flags); });
  }
  // Complaints about a recipe that is complete but for `overrides`.
  std::string complaints_about(const std::vector<std::string>& overrides) { return complaints(kSmall, overrides); }

  static constexpr const char* kSmall = "model: {path: org/model}\ndata: {train: a.jsonl}\n";
  std::string folder_;
  std::string before_;
};

using Recipes = RecipeFiles;

TEST_F(Recipes, ModelAndTrainSuffice) {
  const ResolvedRecipe resolved = load(kSmall);
  const Recipe& r = resolved.recipe;
  EXPECT_EQ(r.model.path, "org/model");
  EXPECT_EQ(r.data.train, std::vector<std::string>{folder_ + "/sub/a.jsonl"});
  EXPECT_EQ(r.output.dir, "runs/my");
  EXPECT_EQ(resolved.origin.at("output.dir"), "derived");
  EXPECT_EQ(resolved.origin.at("lora.rank"), "default");
  EXPECT_EQ(resolved.origin.at("data.train"), "my.yaml:2");
  EXPECT_EQ(resolved.file, "sub/my.yaml");
}

TEST_F(Recipes, DefaultsAreTheProducts) {
  const Recipe r = load(kSmall).recipe;
  EXPECT_EQ(r.lora.rank, 16);
  EXPECT_EQ(r.lora.alpha, 16);
  EXPECT_EQ(r.lora.dropout, 0.05);
  EXPECT_EQ(r.lora.targets, "language");
  EXPECT_EQ(r.lora.train_tables, "none");
  EXPECT_EQ(r.quant.base, "nf4");
  EXPECT_TRUE(r.quant.double_quant);
  EXPECT_FALSE(r.quant.vision);
  EXPECT_EQ(r.optim.learning_rate, 2e-4);
  EXPECT_EQ(r.optim.schedule, "constant");
  EXPECT_EQ(r.optim.warmup_ratio, 0);
  EXPECT_EQ(r.optim.max_grad_norm, 0.3);
  EXPECT_EQ(r.optim.weight_decay, 0);
  EXPECT_EQ(r.train.epochs, 3);
  EXPECT_EQ(r.train.micro_batch, 1);
  EXPECT_EQ(r.train.accumulation, 4);
  EXPECT_EQ(r.train.seed, 42);
  EXPECT_EQ(r.train.device, "auto");
  EXPECT_EQ(r.data.loss_on, "answer");
  EXPECT_EQ(r.data.max_length, 0);
  EXPECT_EQ(r.checkpoint.every, "epoch");
  EXPECT_EQ(r.checkpoint.keep, 3);
  EXPECT_EQ(r.image.exif, "apply");
}

TEST_F(Recipes, ARecipeNeedsNoFile) {
  make_folders("base");
  const ResolvedRecipe resolved = load_recipe({"", {"model.path=base", "data.train=a.jsonl"}, {}});
  EXPECT_EQ(resolved.recipe.model.path, folder_ + "/base");
  EXPECT_EQ(resolved.recipe.data.train, std::vector<std::string>{folder_ + "/a.jsonl"});
  EXPECT_EQ(resolved.recipe.output.dir, "runs/base");
  EXPECT_EQ(resolved.origin.at("model.path"), "command line");
  EXPECT_EQ(load_recipe({"", {"model.path=org/model", "data.train=a.jsonl"}, {}}).recipe.output.dir, "runs/model");
}

TEST_F(Recipes, PathsOfTheFileAreRelativeToItAndOthersToTheCurrentFolder) {
  const std::string yaml =
      "model:\n  path: ../base\n  tokenizer: tok\n"
      "data:\n  train: [a.jsonl, /abs/b.jsonl, gs://bucket/c]\n  eval: x/../e.jsonl\n"
      "lora:\n  init: adapter/\noutput:\n  dir: out\n";
  Recipe r = load(yaml).recipe;
  EXPECT_EQ(r.model.path, folder_ + "/base");
  EXPECT_EQ(r.model.tokenizer, folder_ + "/sub/tok");
  EXPECT_EQ(r.data.train, (std::vector<std::string>{folder_ + "/sub/a.jsonl", "/abs/b.jsonl", "gs://bucket/c"}));
  EXPECT_EQ(r.data.eval, std::vector<std::string>{folder_ + "/sub/e.jsonl"});
  EXPECT_EQ(r.lora.init, folder_ + "/sub/adapter");
  EXPECT_EQ(r.output.dir, "out");
  r = load(yaml, {"model.path=./base", "lora.init=adapter", "output.dir=gs://bucket/run"}).recipe;
  EXPECT_EQ(r.model.path, folder_ + "/base");
  EXPECT_EQ(r.lora.init, folder_ + "/adapter");
  EXPECT_EQ(r.output.dir, "gs://bucket/run");
}

TEST_F(Recipes, AHubIdIsAPathOnlyWhenThatFolderIsThere) {
  EXPECT_EQ(load(kSmall).recipe.model.path, "org/model");
  make_folders("sub/org/model");
  EXPECT_EQ(load(kSmall).recipe.model.path, folder_ + "/sub/org/model");
  EXPECT_EQ(load(kSmall, {"data.train=org/pictures"}).recipe.data.train, std::vector<std::string>{"org/pictures"});
  EXPECT_EQ(load(kSmall, {"data.train=data/train.jsonl"}).recipe.data.train,
            std::vector<std::string>{folder_ + "/data/train.jsonl"});
  EXPECT_EQ(load(kSmall, {"model.path=a/b/c"}).recipe.model.path, folder_ + "/a/b/c");
}

TEST_F(Recipes, NumbersAreReadInEveryUsualSpelling) {
  const Recipe r = load(std::string(kSmall) +
                        "optim: {learning_rate: 1e-4, eps: 1E-8, max_grad_norm: +1}\n"
                        "train: {max_steps: 1e3, seed: \"7\"}\n"
                        "quant: {vision: Yes}\n")
                       .recipe;
  EXPECT_EQ(r.optim.learning_rate, 1e-4);
  EXPECT_EQ(r.optim.eps, 1e-8);
  EXPECT_EQ(r.optim.max_grad_norm, 1);
  EXPECT_EQ(r.train.max_steps, 1000);
  EXPECT_EQ(r.train.seed, 7);
  EXPECT_TRUE(r.quant.vision);
}

TEST_F(Recipes, OverridesTakeTextsAsTheyStand) {
  const Recipe r = load(kSmall, {"data.prompt={Product Name}: what # is it?", "data.answer=\"{a}\"", "lora.rank=8", "lora.rank=4",
                                 "data.eval=[e.jsonl, \"f, g.jsonl\"]", "data.system=a=b"})
                       .recipe;
  EXPECT_EQ(r.data.prompt, "{Product Name}: what # is it?");
  EXPECT_EQ(r.data.answer, "{a}");
  EXPECT_EQ(r.lora.rank, 4);
  EXPECT_EQ(r.data.eval, (std::vector<std::string>{folder_ + "/e.jsonl", folder_ + "/f, g.jsonl"}));
  EXPECT_EQ(r.data.system, "a=b");
}

TEST_F(Recipes, AnEmptySectionIsAllowed) {
  EXPECT_EQ(load(std::string(kSmall) + "lora:\n  # rank: 8\n").recipe.lora.rank, 16);
}

TEST_F(Recipes, UnknownNamesComeWithASuggestion) {
  EXPECT_EQ(
      complaints("modle: {path: a}\n"
                 "data:\n"
                 "  trian: a.jsonl\n"
                 "  train: a.jsonl\n"
                 "lora:\n"
                 "  r: 8\n"
                 "  learning_rate: 1e-4\n"
                 "  bananas: 1\n"
                 "lora.rank: 8\n"
                 "fruit: 1\n"
                 "lora_alpha: 1\n",
                 {"lora.rnak=8", "max_steps=8", "quant.double_quant=true", "fruit=1"}),
      "sub/my.yaml:1: modle: unknown section; did you mean model?\n"
      "sub/my.yaml:3: data.trian: unknown key; did you mean data.train?\n"
      "sub/my.yaml:6: lora.r: unknown key; did you mean lora.rank?\n"
      "sub/my.yaml:7: lora.learning_rate: unknown key; did you mean optim.learning_rate?\n"
      "sub/my.yaml:8: lora.bananas: unknown key; lora has rank, alpha, dropout, rslora, targets, vision_rank, "
      "vision_learning_rate, train_tables, init\n"
      "sub/my.yaml:9: lora.rank: unknown section; write \"lora:\" and under it \"rank:\"\n"
      "sub/my.yaml:10: fruit: unknown section; expected one of model, data, image, lora, quant, optim, train, checkpoint, eval, "
      "logging, hub, dist, output, debug\n"
      "sub/my.yaml:11: lora_alpha: unknown section; did you mean lora.alpha?\n"
      "command line: lora.rnak: unknown key; did you mean lora.rank?\n"
      "command line: max_steps: unknown key; did you mean train.max_steps?\n"
      "command line: quant.double_quant: unknown key; did you mean quant.double?\n"
      "command line: fruit: unknown key; gemtune recipe --help-keys lists all\n"
      "model.path: is missing; give a model folder or a hub id, e.g. google/gemma-3-4b-it");
}

TEST_F(Recipes, WrongTypesNameTheLineAndTheMeaning) {
  EXPECT_EQ(
      complaints("model:\n"
                 "  path: [a, b]\n"
                 "data:\n"
                 "  train: {a: b}\n"
                 "  prompt: {caption}\n"
                 "  max_length: none\n"
                 "lora:\n"
                 "  rank: 1.5\n"
                 "  alpha: inf\n"
                 "train:\n"
                 "  epochs:\n"
                 "  micro_batch: 99999999999\n"
                 "quant: nf4\n"
                 "logging: {tensorboard: 1}\n",
                 {"lora.dropout=", "train.seed=0x10", "nonsense"}),
      "sub/my.yaml:2: model.path: expected one value, got a list\n"
      "sub/my.yaml:4: data.train: expected one value, got a map (source or list of sources: .jsonl, .parquet, folder of images "
      "with "
      "metadata.jsonl or .csv)\n"
      "sub/my.yaml:5: data.prompt: expected one value, got a map; put the text in quotes\n"
      "sub/my.yaml:6: data.max_length: expected a whole number, got \"none\" (longest row in tokens; 0: the model's own limit)\n"
      "sub/my.yaml:8: lora.rank: expected a whole number, got \"1.5\" (rank of the adapters; 0: no adapters, every weight is "
      "trained "
      "(full fine-tuning))\n"
      "sub/my.yaml:9: lora.alpha: expected a number, got \"inf\" (scale is alpha ÷ rank)\n"
      "sub/my.yaml:11: train.epochs: has no value; give one or remove the key (passes over the data)\n"
      "sub/my.yaml:12: train.micro_batch: expected a whole number up to 2147483647, got \"99999999999\" (rows in one forward "
      "pass on "
      "each rank)\n"
      "sub/my.yaml:13: quant: expected a section of keys, got \"nf4\"\n"
      "sub/my.yaml:14: logging.tensorboard: expected true or false, got \"1\" (write event files to RUN_DIR/tensorboard)\n"
      "command line: lora.dropout: has no value; give one after the equals sign (dropout on the adapters' input, 0 ≤ p < 1)\n"
      "command line: train.seed: expected a whole number, got \"0x10\" (order, adapter initialisation and dropout follow from it "
      "alone)\n"
      "command line: expected key=value, got \"nonsense\"");
}

TEST_F(Recipes, BrokenYamlNamesTheLine) {
  EXPECT_EQ(complaints("model:\n  path: a\n data: b\n"),
            "sub/my.yaml:3: not valid YAML: end of map not found; a text with \": \", \" #\" or a leading brace needs quotes");
  EXPECT_EQ(error_of([] { load_recipe({"absent.yaml", {}, {}}); }), "absent.yaml: no such file; check the path");
  const std::string small = kSmall;
  EXPECT_EQ(complaints(small + "---\n" + small, {"model.path=a/b", "data.train=c"}),
            "sub/my.yaml: expected one YAML document, got 2; remove the others");
  EXPECT_EQ(complaints("- a\n", {"model.path=a/b", "data.train=c"}),
            "sub/my.yaml:1: expected sections such as \"model:\" with keys under them");
  EXPECT_EQ(complaints("model: {path: \"\xFF\"}\n", {"model.path=a/b", "data.train=c"}),
            "sub/my.yaml: expected YAML in UTF-8; save it as UTF-8 text");
  EXPECT_EQ(complaints(small + "model: {tokenizer: x}\n"), "sub/my.yaml:3: model: the section stands twice; join the two");
  EXPECT_EQ(complaints(small + "lora:\n  rank: 1\n  rank: 2\n"), "sub/my.yaml:5: lora.rank: stands twice; keep one");
  EXPECT_EQ(complaints(small + "debug: " + std::string(100000, '['), {}).substr(0, 31), "sub/my.yaml:3: not valid YAML: ");
}

TEST_F(Recipes, ChoicesAreListed) {
  EXPECT_EQ(complaints_about({"lora.targets=all_linear", "data.loss_on=prompt", "checkpoint.every=epochs", "eval.every=0",
                              "checkpoint.every=N"}),
            "command line: data.loss_on: expected answer, last_answer or all, got \"prompt\"\n"
            "command line: lora.targets: expected language, vision or all-linear, got \"all_linear\"; did you mean all-linear?\n"
            "command line: checkpoint.every: N stands for a number of steps, e.g. 100\n"
            "command line: eval.every: expected epoch, a number of steps or never, got \"0\"\n"
            "command line: eval.every: 0 needs held-out rows; set data.eval or eval.every: never");
  EXPECT_EQ(load(kSmall, {"checkpoint.every=25"}).recipe.checkpoint.every, "25");
  EXPECT_EQ(complaints_about({"checkpoint.every=1e2"}),
            "command line: checkpoint.every: expected epoch, a number of steps or never, got \"1e2\"");
}

TEST_F(Recipes, EveryRangeIsChecked) {
  EXPECT_EQ(complaints_about({"lora.rank=-1", "lora.alpha=0", "lora.dropout=1", "optim.learning_rate=0", "optim.warmup_ratio=1",
                              "optim.max_grad_norm=-0.5", "train.epochs=0", "train.micro_batch=0", "train.accumulation=0",
                              "train.seed=-1", "logging.every=0", "dist.nproc=0", "dist.timeout_s=0", "image.max_pixels=0",
                              "hub.repo_id=a/b/c", "data.train=[\"\"]"}),
            "command line: data.train: names an empty source; remove it or give a file or folder\n"
            "command line: image.max_pixels: expected 1 or more, got 0\n"
            "command line: lora.rank: expected 0 or more, got -1\n"
            "command line: lora.alpha: expected a number above 0, got 0\n"
            "command line: lora.dropout: expected 0 or more and below 1, got 1\n"
            "command line: optim.learning_rate: expected a number above 0, got 0\n"
            "command line: optim.warmup_ratio: expected 0 or more and below 1, got 1\n"
            "command line: optim.max_grad_norm: expected 0 or more, got -0.5\n"
            "command line: train.epochs: expected a number above 0, got 0\n"
            "command line: train.micro_batch: expected 1 or more, got 0\n"
            "command line: train.accumulation: expected 1 or more, got 0\n"
            "command line: train.seed: expected 0 or more, got -1\n"
            "command line: logging.every: expected 1 or more, got 0\n"
            "command line: dist.nproc: expected 1 or more, got 0\n"
            "command line: dist.timeout_s: expected a number above 0, got 0\n"
            "command line: hub.repo_id: expected ORG/NAME or NAME, got \"a/b/c\"");
}

TEST_F(Recipes, ContradictionsAreRefused) {
  EXPECT_EQ(complaints(std::string(kSmall) + "lora:\n  rank: 0\n  train_tables: tied\n  init: x\n"),
            "sub/my.yaml:4: lora.rank: 0 trains every weight, and full fine-tuning cannot train a quantised base; set "
            "quant.base: none\n"
            "sub/my.yaml:5: lora.train_tables: tied belongs to adapters, and lora.rank 0 trains the tables with every other "
            "weight; set "
            "lora.train_tables: none\n"
            "sub/my.yaml:6: lora.init: continues an adapter, and lora.rank 0 has none; remove it or set lora.rank");
  EXPECT_EQ(load(kSmall, {"lora.rank=0", "quant.base=none"}).recipe.lora.rank, 0);
  EXPECT_EQ(
      complaints_about({"lora.vision_rank=4", "lora.vision_learning_rate=1e-5"}),
      "command line: lora.vision_rank: has no effect while lora.targets is language; set lora.targets: all-linear or remove it\n"
      "command line: lora.vision_learning_rate: has no effect while lora.targets is language; set lora.targets: all-linear or "
      "remove "
      "it");
  EXPECT_EQ(complaints_about({"quant.vision=true", "quant.base=none"}),
            "command line: quant.vision: true needs quant.base: nf4; set it or remove quant.vision");
  EXPECT_EQ(complaints_about({"eval.every=epoch"}),
            "command line: eval.every: epoch needs held-out rows; set data.eval or eval.every: never");
  EXPECT_EQ(complaints_about({"data.prompt=What?"}),
            "command line: data.prompt: needs data.answer, the template of what the model shall say; set it, e.g. \"{caption}\"");
  make_folders("base");
  EXPECT_EQ(complaints_about({"model.path=base", "output.dir=./base"}),
            "command line: output.dir: \"./base\" is model.path; choose another folder for the run");
}

TEST_F(Recipes, HalfPrecisionIsRefusedWithTheReason) {
  const std::string refusal =
      "fp16 is refused: Gemma 3's activations exceed its largest number (65504) and become NaN; leave it out: the engine "
      "computes in bf16 "
      "with fp32 accumulation on GPUs and in fp32 on a CPU";
  EXPECT_EQ(complaints_about({"train.fp16=true", "optim.table_dtype=float16"}),
            "command line: train.fp16: unknown key; " + refusal + "\ncommand line: optim.table_dtype: " + refusal);
}

TEST_F(Recipes, YamlReadsBackToTheSameValues) {
  Recipe recipe = load(kSmall).recipe;
  recipe.data.system = "tab\t, line\n\n  \"quoted\" \\ {x}: y # z \x01\x7F \u0085\u00A0\u2028\uFEFF é 😊 ";
  recipe.data.prompt = "true";
  recipe.data.answer = "007";
  recipe.data.image_column = "null";
  recipe.data.eval = {"/a, b", "/[c]", "gs://d/e"};
  recipe.optim.learning_rate = 0.1 + 0.2;
  recipe.optim.eps = 1e-300;
  recipe.train.seed = INT64_MAX;
  recipe.image.max_pixels = 9007199254740993;
  const std::string yaml = to_yaml(recipe);
  write_file_atomically("stored.yaml", yaml);
  const Recipe back = load_recipe({"stored.yaml", {}, {}}).recipe;
  EXPECT_EQ(to_yaml(back), yaml);
  EXPECT_EQ(back.data.system, recipe.data.system);
  EXPECT_EQ(back.data.prompt, "true");
  EXPECT_EQ(back.data.answer, "007");
  EXPECT_EQ(back.data.eval, recipe.data.eval);
  EXPECT_EQ(back.optim.learning_rate, 0.1 + 0.2);
  EXPECT_EQ(back.train.seed, INT64_MAX);
  EXPECT_EQ(back.image.max_pixels, 9007199254740993);
  EXPECT_TRUE(differences_that_forbid_resume(recipe, back).empty());
}

TEST_F(Recipes, DescribeNamesTheOriginOfEachValue) {
  const std::string text = describe(load(kSmall, {"lora.rank=8", "data.system=" + std::string(200, 'x')}));
  EXPECT_NE(text.find("\nlora.rank                  8  (command line)\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\nlora.alpha                 16  (default)\n"), std::string::npos) << text;
  EXPECT_EQ(text.substr(0, text.find('\n')), "model.path                 org/model  (my.yaml:1)");
  EXPECT_NE(text.find("\noutput.dir                 runs/my  (derived)\n"), std::string::npos) << text;
  EXPECT_NE(text.find(std::string(100, 'x') + "…  (command line)\n"), std::string::npos) << text;
}

TEST_F(Recipes, OnlySomeKeysMayChangeOnResume) {
  const Recipe stored = load(kSmall).recipe;
  Recipe now = load(kSmall, {"train.epochs=5", "train.max_steps=9", "dist.nproc=2", "logging.every=7",
                             "logging.tensorboard=false", "checkpoint.keep=1", "output.dir=elsewhere"})
                   .recipe;
  EXPECT_TRUE(differences_that_forbid_resume(stored, now).empty());
  now = load(kSmall, {"lora.rank=8", "data.answer=\"{a}\"", "optim.learning_rate=1e-4"}).recipe;
  EXPECT_EQ(differences_that_forbid_resume(stored, now),
            (std::vector<std::string>{"data.answer: \"\" in the run, \"{a}\" now", "lora.rank: 16 in the run, 8 now",
                                      "optim.learning_rate: 0.0002 in the run, 0.0001 now"}));
}

// Compares a file of the project with its text in the program; GEMTUNE_UPDATE=1 writes the file.
void expect_file(const std::string& name, const std::string& text) {
  const std::string path = std::string(GEMTUNE_SOURCE_DIR) + "/" + name;
  if (std::getenv("GEMTUNE_UPDATE") != nullptr) write_file_atomically(path, text);
  EXPECT_TRUE(read_file(path) == text) << path << " is not what the program says; run: GEMTUNE_UPDATE=1 recipe_test";
}

TEST(RecipeFolder, TheDocumentIsMadeFromTheKeys) {
  expect_file("docs/recipes.md", recipe_document());
}

TEST(RecipeFolder, TheTutorialFileIsTheBuiltInText) {
  expect_file("recipes/tutorial.yaml", kTutorialYaml);
  expect_file("recipes/gpus.yaml", kGpusYaml);
}

TEST(RecipeFolder, TheFullFileIsMadeFromTheKeys) {
  expect_file("recipes/full.yaml", full_recipe());
}

TEST(RecipeFolder, TheFullFileNamesEveryKeyAtItsDefault) {
  const ResolvedRecipe full = load_recipe({std::string(GEMTUNE_SOURCE_DIR) + "/recipes/full.yaml", {}, {}});
  Recipe defaults;
  defaults.model.path = full.recipe.model.path;
  defaults.data.train = full.recipe.data.train;
  defaults.output.dir = full.recipe.output.dir;
  EXPECT_EQ(to_yaml(full.recipe), to_yaml(defaults));
  for (const KeyHelp& key : recipe_keys()) {
    if (key.key == "output.dir") continue;  // empty there, so derived
    EXPECT_TRUE(full.origin.at(key.key).starts_with("full.yaml:")) << key.key;
  }
}

TEST(RecipeFolder, TheMinimalFileLoads) {
  const Recipe minimal = load_recipe({std::string(GEMTUNE_SOURCE_DIR) + "/recipes/minimal.yaml", {}, {}}).recipe;
  EXPECT_EQ(minimal.model.path, "google/gemma-3-4b-it");
  EXPECT_EQ(minimal.output.dir, "runs/minimal");
}

TEST(RecipeKeys, EveryKeyHasHelpAndItsDefaultIsAChoice) {
  std::set<std::string> seen;
  for (const KeyHelp& key : recipe_keys()) {
    EXPECT_TRUE(seen.insert(key.key).second) << key.key;
    EXPECT_GT(key.help.size(), 10u) << key.key;
    const auto choices = choices_of(key.help);
    if (choices.empty()) continue;
    EXPECT_NE(std::find(choices.begin(), choices.end(), key.default_value), choices.end()) << key.key;
  }
  EXPECT_TRUE(seen.contains("quant.double"));
}

TEST(RecipeKeys, ChoicesComeFromTheHelp) {
  EXPECT_EQ(choices_of("a|b-c|N: what it is"), (std::vector<std::string>{"a", "b-c", "N"}));
  EXPECT_TRUE(choices_of("true: x | y").empty());
  EXPECT_TRUE(choices_of("free text").empty());
}

using Tutorial = RecipeFiles;

TEST_F(Tutorial, OneFlagRunsItWithItsOwnNumbers) {
  const ResolvedRecipe resolved = load_recipe({"", {}, {{"--gcs_bucket", "my-bucket"}}});
  const Recipe& r = resolved.recipe;
  EXPECT_EQ(r.model.path, "google/gemma-3-4b-it");
  EXPECT_EQ(r.data.train, std::vector<std::string>{"philschmid/amazon-product-descriptions-vlm"});
  EXPECT_EQ(r.data.system, "You are an expert product description writer for Amazon.");
  EXPECT_EQ(r.data.prompt,
            "Create a Short Product description based on the provided <PRODUCT> and <CATEGORY> and image.\n"
            "Only return description. The description should be SEO optimized and for a better mobile search experience.\n"
            "\n"
            "<PRODUCT>\n"
            "{Product Name}\n"
            "</PRODUCT>\n"
            "\n"
            "<CATEGORY>\n"
            "{Category}\n"
            "</CATEGORY>\n");
  EXPECT_EQ(r.data.answer, "{description}");
  EXPECT_EQ(r.data.image_column, "image");
  EXPECT_EQ(r.data.image_place, "after");
  EXPECT_EQ(r.data.loss_on, "all");
  EXPECT_EQ(r.data.max_length, 0);
  EXPECT_EQ(r.image.exif, "ignore");
  EXPECT_EQ(r.lora.rank, 16);
  EXPECT_EQ(r.lora.alpha, 16);
  EXPECT_EQ(r.lora.dropout, 0.05);
  EXPECT_EQ(r.lora.targets, "all-linear");
  EXPECT_EQ(r.lora.train_tables, "untied");
  EXPECT_EQ(r.quant.base, "nf4");
  EXPECT_TRUE(r.quant.double_quant);
  EXPECT_TRUE(r.quant.vision);
  EXPECT_EQ(r.optim.learning_rate, 2e-4);
  EXPECT_EQ(r.optim.schedule, "constant");
  EXPECT_EQ(r.optim.warmup_ratio, 0);
  EXPECT_EQ(r.optim.max_grad_norm, 0.3);
  EXPECT_EQ(r.train.epochs, 3);
  EXPECT_EQ(r.train.micro_batch, 1);
  EXPECT_EQ(r.train.accumulation, 4);
  EXPECT_EQ(r.train.recompute, "auto");
  EXPECT_EQ(r.dist.nproc, 1);
  EXPECT_EQ(r.dist.workers, 16);
  EXPECT_EQ(r.checkpoint.every, "epoch");
  EXPECT_EQ(r.logging.every, 10);
  EXPECT_FALSE(r.hub.push);
  EXPECT_EQ(r.output.dir, "gs://my-bucket/gemma-3-4b-seo-optimized");
  EXPECT_EQ(resolved.origin.at("output.dir"), "--gcs_bucket");
  EXPECT_TRUE(resolved.origin.at("lora.rank").starts_with("tutorial.yaml:"));
}

TEST_F(Tutorial, EachArgumentActs) {
  const Recipe base = load_recipe({"", {}, {{"--gcs_bucket", "bucket"}}}).recipe;
  const std::vector<std::pair<Flags, std::string>> cases = {
      {{{"--model_id", "org/other"}}, "model.path: google/gemma-3-4b-it in the run, org/other now"},
      {{{"--dataset_name", "org/rows"}}, "data.train: [philschmid/amazon-product-descriptions-vlm] in the run, [org/rows] now"},
      {{{"--push_to_hub", ""}}, "hub.push: false in the run, true now"},
      {{{"--lora_r", "8"}}, "lora.rank: 16 in the run, 8 now"},
      {{{"--lora_alpha", "32"}}, "lora.alpha: 16 in the run, 32 now"},
      {{{"--lora_dropout", "0.1"}}, "lora.dropout: 0.05 in the run, 0.1 now"},
      {{{"--max_seq_length", "64"}}, "data.max_length: 0 in the run, 64 now"},
      {{{"--max-seq-length", "64"}}, "data.max_length: 0 in the run, 64 now"},
      {{{"--per_device_train_batch_size", "2"}}, "train.micro_batch: 1 in the run, 2 now"},
      {{{"--gradient_accumulation_steps", "8"}}, "train.accumulation: 4 in the run, 8 now"},
      {{{"--learning_rate", "1e-5"}}, "optim.learning_rate: 0.0002 in the run, 1e-05 now"},
      {{{"--save_strategy", "no"}}, "checkpoint.every: epoch in the run, never now"},
      {{{"--save_strategy", "steps"}}, "checkpoint.every: epoch in the run, \"100\" now"},
      {{{"--save_steps", "25"}, {"--save_strategy", "steps"}}, "checkpoint.every: epoch in the run, \"25\" now"},
  };
  for (const auto& [flags, difference] : cases) {
    const Recipe r = load_recipe({"", {}, flags}).recipe;
    EXPECT_EQ(differences_that_forbid_resume(base, r), std::vector<std::string>{difference});
  }
  EXPECT_EQ(load_recipe({"", {}, {{"--num_train_epochs", "1"}}}).recipe.train.epochs, 1);
  EXPECT_EQ(load_recipe({"", {}, {{"--logging_steps", "3"}}}).recipe.logging.every, 3);
  EXPECT_EQ(load_recipe({"", {}, {{"--save_strategy", "epoch"}}}).recipe.checkpoint.every, "epoch");
  EXPECT_EQ(load_recipe({"", {}, {{"--output_dir", "out/mine"}}}).recipe.output.dir, "out/mine");
  EXPECT_EQ(load_recipe({"", {}, {{"--lora_r", "8"}}}).recipe.output.dir, "runs/gemma-3-4b-seo-optimized");
  EXPECT_EQ(load_recipe({"", {}, {{"--gcs_bucket", "gs://b-1/x/"}, {"--output_dir", "out/mine"}}}).recipe.output.dir,
            "gs://b-1/x/mine");
}

TEST_F(Tutorial, TheScriptHasSixteenArguments) {
  EXPECT_EQ(tutorial_flags().size(), 16u);
}

TEST_F(Tutorial, FlagsOverrideAFile) {
  const ResolvedRecipe resolved =
      load(kSmall, {}, {{"--lora_r", "8"}, {"--gcs_bucket", "bucket"}, {"--dataset_name", "rows.jsonl"}});
  EXPECT_EQ(resolved.recipe.lora.rank, 8);
  EXPECT_EQ(resolved.recipe.lora.targets, "language");
  EXPECT_EQ(resolved.recipe.output.dir, "gs://bucket/my");
  EXPECT_EQ(resolved.recipe.data.train, std::vector<std::string>{folder_ + "/rows.jsonl"});
  EXPECT_EQ(resolved.origin.at("lora.rank"), "--lora_r");
}

TEST_F(Tutorial, WhatCannotActIsRefusedByName) {
  EXPECT_EQ(
      complaints(kSmall, {"lora.alpha=8"},
                 {{"--lora_r", "many"},
                  {"--lora_alpha", "4"},
                  {"--save_steps", "50"},
                  {"--gcs_bucket", "s3://bucket"},
                  {"--max_seq_lenght", "64"},
                  {"--learning_rate", ""},
                  {"--lora_dropout", "2"}}),
      "--lora_r: lora.rank: expected a whole number, got \"many\" (rank of the adapters; 0: no adapters, every weight is trained "
      "(full fine-tuning))\n"
      "--lora_alpha: lora.alpha: is also set by lora.alpha=…; give one of the two\n"
      "--max_seq_lenght: unknown flag; did you mean --max_seq_length?\n"
      "--learning_rate: optim.learning_rate: has no value; give one after the flag (peak learning rate of AdamW)\n"
      "--gcs_bucket: expected a Cloud Storage bucket such as my-bucket or gs://my-bucket, got \"s3://bucket\"\n"
      "--save_steps: acts only with --save_strategy steps; add it or leave --save_steps out\n"
      "--lora_dropout: lora.dropout: expected 0 or more and below 1, got 2");
  EXPECT_EQ(complaints(kSmall, {}, {{"--save_strategy", "best"}}), "--save_strategy: expected epoch, steps or no, got \"best\"");
  EXPECT_EQ(complaints(kSmall, {}, {{"--save_strategy", "steps"}, {"--save_steps", "x"}}),
            "--save_steps: expected a whole number, got \"x\"");
}

}  // namespace
}  // namespace gemtune
