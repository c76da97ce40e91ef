// libFuzzer: any bytes as a tokenizer.json and as text. Only Error may be thrown; pieces tile the text.
#include "base/error.h"
#include "data/tokenizer.h"

#include <fmt/core.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

namespace {

using gemtune::Tokenizer;

std::shared_ptr<const Tokenizer> small_tokenizer() {
  std::string vocabulary = R"("<bos>":0,"\n":1,"\n\n":2,"▁":3,"a":4,"b":5,"ab":6,"▁a":7,"aa":8,"▁▁":9)";
  for (int byte = 0; byte < 256; ++byte) vocabulary += fmt::format(R"(,"<0x{:02X}>":{})", byte, 10 + byte);
  const std::string json =
      R"({"added_tokens":[{"id":0,"content":"<bos>","special":true},{"id":1,"content":"\n"},{"id":2,"content":"\n\n"}],)"
      R"("normalizer":{"type":"Replace","pattern":{"String":" "},"content":"▁"},"model":{"type":"BPE","byte_fallback":true,"vocab":{)" +
      vocabulary + R"(},"merges":[["▁","a"],["a","a"],["a","b"],["▁","▁"]]}})";
  return Tokenizer::parse(json, "small");
}

void check(bool holds) {
  if (!holds) std::abort();
}

// `text` in two spans, control strings allowed in the first one.
void check_encoding(const Tokenizer& tokenizer, std::string_view text) {
  const size_t half = text.size() / 2;
  int64_t place = 0;
  for (const Tokenizer::Piece& piece :
       tokenizer.encode_pieces({{std::string(text.substr(0, half)), true}, {std::string(text.substr(half)), false}})) {
    check(piece.begin == place && piece.end > piece.begin);
    check(piece.id >= 0 && piece.id < tokenizer.vocab_size());
    check(!tokenizer.is_special(piece.id) || piece.end <= static_cast<int64_t>(half));
    place = piece.end;
  }
  check(place == static_cast<int64_t>(text.size()));
  tokenizer.decode(tokenizer.encode(text), Tokenizer::Special::kSkip);
  tokenizer.find_control(text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::shared_ptr<const Tokenizer> small = small_tokenizer();
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  check_encoding(*small, input);
  try {
    const auto tokenizer = Tokenizer::parse(input, "input");
    tokenizer->decode(tokenizer->encode("a b\n\n<bos>\xC3\xA9"), Tokenizer::Special::kKeep);
  } catch (const gemtune::Error&) {
  }
  return 0;
}
