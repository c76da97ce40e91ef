// libtiff's archive refers to a JBIG library whose licence (GPL) does not fit this program. These stand in for its functions:
// JBIG-compressed TIFF files are refused before one of them could be called.
#include "data/image_jbig.h"

namespace gemtune {
const char* const kJbigRefusal = "TIFF with JBIG compression";
}

extern "C" {
void jbg_dec_init(void*);
int jbg_dec_in(void*, unsigned char*, unsigned long, unsigned long*);
unsigned long jbg_dec_getsize(const void*);
unsigned char* jbg_dec_getimage(const void*, int);
void jbg_dec_free(void*);
void jbg_enc_init(void*, unsigned long, unsigned long, int, unsigned char**, void*, void*);
void jbg_enc_out(void*);
void jbg_enc_free(void*);
const char* jbg_strerror(int);
int jbg_newlen(unsigned char*, unsigned long);

void jbg_dec_init(void*) {}
int jbg_dec_in(void*, unsigned char*, unsigned long, unsigned long*) {
  return 1;
}
unsigned long jbg_dec_getsize(const void*) {
  return 0;
}
unsigned char* jbg_dec_getimage(const void*, int) {
  return nullptr;
}
void jbg_dec_free(void*) {}
void jbg_enc_init(void*, unsigned long, unsigned long, int, unsigned char**, void*, void*) {}
void jbg_enc_out(void*) {}
void jbg_enc_free(void*) {}
const char* jbg_strerror(int) {
  return "JBIG is not built in";
}
int jbg_newlen(unsigned char*, unsigned long) {
  return 1;
}
}
