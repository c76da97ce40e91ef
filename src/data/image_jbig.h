#pragma once

namespace gemtune {

// What a refusal calls such files. Naming it here also makes the linker keep the stand-in functions of image_jbig.cpp.
extern const char* const kJbigRefusal;

}  // namespace gemtune
