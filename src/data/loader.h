// Rows in training order, decoded ahead of the step by worker threads.
#pragma once

#include "data/chat.h"
#include "data/dataset.h"
#include "data/image.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gemtune {

// Exactly where training stands: everything the order depends on. Saved with the weights.
struct Cursor {
  int64_t epoch = 0;
  int64_t position = 0;  // rows of this epoch's order already consumed, over all ranks
};

// Permutation of 0..n-1, equal to torch.randperm(n) with a CPU generator seeded with `seed` (MT19937; its low 32 bits
// count). Throws Error(kInput) for n ≥ 2^32 / 20, where the reference's algorithm is another one.
std::vector<int64_t> random_permutation(int64_t n, uint64_t seed);

// A micro-batch, right-padded. B rows, T tokens.
struct Batch {
  int64_t num_rows = 0;
  int64_t num_tokens = 0;                 // T
  std::vector<int64_t> rows;              // B data set rows
  std::vector<int64_t> token_ids;         // B × T, pad id where invalid
  std::vector<uint8_t> valid;             // B × T
  std::vector<uint8_t> target_mask;       // B × T, unshifted
  std::vector<int32_t> image_group;       // B × T: number of the image in its row at soft tokens, else -1
  int64_t num_images = 0;                 // N, in row order, then prompt order
  std::vector<std::string> picture_keys;  // N: what names each picture (picture_key)
  std::vector<int64_t> decoded;           // ascending: the images whose pixels are here; all but those already known
  int image_size = 0;
  std::vector<uint8_t> pixels_NCHW;  // of the decoded images
  int64_t num_targets = 0;           // targets that are predicted: target_mask over positions 1..T-1
  int64_t num_valid = 0;
};

// Right-pads the samples to the longest. `images_CHW[b]` holds the planes of row b's images in prompt order; one without
// planes is left out of `decoded`.
Batch collate(const std::vector<Sample>& samples, const std::vector<std::vector<std::vector<uint8_t>>>& images_CHW,
              int32_t pad_id, int image_size);

// Names a picture as the vision tower sees it: SHA-256 of the encoded file and of everything that turns it into pixels.
std::string picture_key(std::string_view encoded, const ImageOptions& options, int image_size);

struct LoaderOptions {
  uint64_t seed = 42;
  bool shuffle = true;
  int micro_batch = 1;
  int accumulation = 1;
  int rank = 0;
  int world = 1;
  int num_workers = 2;  // threads; 0 = one a core. The content never depends on it
  int steps_ahead = 2;  // steps decoded before they are asked for: the bound on decoded images in memory
  int image_size = 0;   // 0 = text only
  // Whether the vision tower's output for a picture is at hand, so that it need not be decoded; asked by worker threads, and
  // what it says must stay true. With it, a picture that a micro-batch holds twice is decoded once. Empty: decode all.
  std::function<bool(const std::string& picture_key)> is_known;
};

// The micro-batches of one optimizer step on this rank. A step covers micro_batch × accumulation × world rows of the
// epoch's order, fewer at its end; micro-batch k of rank r is the step's global micro-batch k × world + r. Every row of an
// epoch is seen exactly once; a rank may get no rows in the last step.
struct StepBatches {
  Cursor begin;
  Cursor end;  // where training stands after this step; an epoch's last step ends at {epoch + 1, 0}
  int64_t epoch_steps = 0;
  int64_t num_micro_batches = 0;     // over all ranks
  std::vector<int64_t> micro_index;  // global number of each micro-batch below
  std::vector<Batch> micro_batches;  // at most `accumulation`
  double wait_ms = 0;                // how long next() waited for the workers
};

class Loader {
 public:
  // `rows`: the data set rows that take part (all, or those left after skipping bad ones), in data set order.
  Loader(std::shared_ptr<const Dataset> dataset, std::shared_ptr<const Chat> chat, ImageOptions image_options,
         std::vector<int64_t> rows, LoaderOptions options, Cursor start);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // The next step's micro-batches; goes on into the next epoch by itself. Throws what a worker threw (the RowError of the
  // first bad row in the step's order), and again when called again.
  StepBatches next();
  int64_t steps_per_epoch() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Steps an epoch has: ceil(rows ÷ (micro_batch × accumulation × world)).
int64_t steps_per_epoch(int64_t num_rows, const LoaderOptions& options);

// A file as it was when it was checked.
struct FileStamp {
  std::string path;
  int64_t size = 0;
  int64_t mtime_ns = 0;
};

// Every row read, rendered and its images decoded, in parallel.
struct DataReport {
  int64_t num_rows = 0;
  int64_t num_checked = 0;                                         // less than num_rows when the check was stopped
  std::vector<int64_t> used;                                       // rows that can be trained on, ascending
  std::vector<RowFault> faults;                                    // ascending by row
  std::vector<std::pair<std::string, int64_t>> skipped_by_reason;  // most frequent first
  std::vector<int32_t> lengths;                                    // tokens of each used row
  int64_t num_targets = 0;                                         // tokens that carry loss in the used rows
  int64_t most_targets = 0;                                        // in one row
  int64_t most_images = 0;                                         // in one row
  std::vector<std::string> notes;      // once a kind: "3 rows hold animated images: the first frame is used"
  std::vector<FileStamp> image_files;  // image files outside the sources, each once, for the cache
};

enum class CheckDepth { kTokens, kImages };  // kImages also decodes every picture

struct CheckHooks {
  const std::atomic<bool>* stop = nullptr;                       // set: the check ends soon with a partial report
  std::function<void(int64_t checked, int64_t total)> progress;  // every 10 s, from the calling thread; default: a log line
};

// A row without target tokens is no fault: it is left out of `used` and counted in `skipped_by_reason`.
DataReport check_dataset(const Dataset& dataset, const Chat& chat, const ImageOptions& image_options, CheckDepth depth,
                         int num_workers, const CheckHooks& hooks = {});

// Reports kept in cache_folder()/checks. The key covers path, size and mtime of the data set's files and `options`: whatever
// else the result depends on, spelled out by the caller (tokenizer hash, chat and image options, mapping, depth).
std::string check_key(const Dataset& dataset, const std::string& options);
// Nothing when there is none, when it cannot be read, or when an image file changed since.
std::optional<DataReport> load_report(const std::string& key);
// Partial reports and reports of missing files are not kept. A cache that cannot be written is a warning, not an error.
void save_report(const std::string& key, const DataReport& report);

}  // namespace gemtune
