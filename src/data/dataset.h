// Sources of rows: JSONL, CSV, image folder with metadata, parquet with image cells; one or several, concatenated in order.
// docs/data.md describes the accepted forms for users.
#pragma once

#include "data/row.h"

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace gemtune {

// How columns become messages. Templates hold column names in braces: "{Product Name}"; "{{" and "}}" are literal braces.
struct RowMapping {
  std::string image_column;  // "" = image, images or file_name, whichever the source has
  std::string system;        // template of the system turn; "" = none
  std::string prompt;        // template of the user turn; "" = the source has ready `messages`
  std::string answer;        // template of the assistant turn
  bool image_first = false;  // where the picture stands in the user turn built from templates (the tutorial: after the text)
};

// Short names of kinds of fault: the keys of `skipped` in `data check --json`. Other layers may add their own.
namespace reason {
inline constexpr const char* kMalformed = "malformed row";     // not JSON, wrong type, wrong number of fields
inline constexpr const char* kMessages = "messages";           // a message or part that is none
inline constexpr const char* kRoles = "roles";                 // unknown role, wrong order of turns
inline constexpr const char* kNoAnswer = "no answer";          // blank or absent answer
inline constexpr const char* kNoTargets = "no target tokens";  // nothing to learn from
inline constexpr const char* kImageCount = "image count";      // placeholders and images differ
inline constexpr const char* kImageCell = "image cell";        // an image cell that names no image
inline constexpr const char* kImagePath = "image path";        // a path that leaves the data set's folder
inline constexpr const char* kMissingFile = "missing file";
inline constexpr const char* kDamagedImage = "damaged image";
inline constexpr const char* kTooLong = "too long";
inline constexpr const char* kControlText = "control string";
inline constexpr const char* kOther = "other";
}  // namespace reason

// One fault of one row, as `data check` lists it.
struct RowFault {
  int64_t row = 0;
  std::string file;
  int64_t line = 0;
  std::string where;
  std::string field;   // "images[1]", "messages[2].role"
  std::string value;   // what stands there, shortened, without quotes around it
  std::string rule;    // what must hold, and what to do
  std::string reason;  // one of gemtune::reason
};

// A row that breaks a rule: thrown by Dataset::row and collected by the check. what() reads "WHERE: FIELD VALUE: RULE", the
// value quoted unless it is a number; an empty field or value is left out.
class RowError : public std::runtime_error {
 public:
  explicit RowError(RowFault fault);
  const RowFault& fault() const { return fault_; }

 private:
  RowFault fault_;
};

// A fault of `row`, ready to throw. The value is shortened here.
RowError row_error(const Row& row, const std::string& field, const std::string& value, const std::string& rule,
                   const std::string& reason);

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;
  // Reads row `index` (0 ≤ index < size()). Safe to call from several threads. Throws RowError. Image files are located
  // (inside the folder of the file that names them, existing) but not opened.
  virtual Row row(int64_t index) const = 0;
  // Files the rows come from, for caches keyed by path, size and mtime.
  virtual std::vector<std::string> files() const = 0;
  // One line for people: "1,500 rows of examples/fashion/train.parquet (columns: image, label, …)".
  virtual std::string description() const = 0;
};

// Opens one source or several, concatenated. A source is a .jsonl or .csv file, a .parquet file, a folder of .parquet files,
// an image folder with metadata.jsonl or metadata.csv, or a glob of such files (sorted). Throws Error(kInput) for what is
// wrong with a source as a whole.
std::unique_ptr<Dataset> open_dataset(const std::vector<std::string>& sources, const RowMapping& mapping);

}  // namespace gemtune
