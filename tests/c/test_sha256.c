// SHA-256 and HMAC: published test vectors, with the input split in different ways.
#include <stdio.h>
#include <string.h>

#include "base/sha256.h"
#include "check.h"

struct vector {
    const char *key; // NULL: a plain hash
    size_t key_bytes;
    const char *text;
    size_t text_bytes;
    const char *digest;
};

#define LIT(s) (s), sizeof(s) - 1
#define X4(s) s s s s
#define X16(s) X4(X4(s))

// FIPS 180-4 (the examples of SHA-256) and RFC 4231.
static const struct vector vectors[] = {
    {NULL, 0, LIT("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
    {NULL, 0, LIT(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
    {NULL, 0, LIT("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
     "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
    {NULL, 0,
     LIT("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
         "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu"),
     "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
    {LIT(X16("\x0b") X4("\x0b")), LIT("Hi There"), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
    {LIT("Jefe"), LIT("what do ya want for nothing?"),
     "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
    {LIT(X16("\xaa") X4("\xaa")), LIT(X16("\xdd") X16("\xdd") X16("\xdd") "\xdd\xdd"),
     "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
    {LIT("\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19"),
     LIT(X16("\xcd") X16("\xcd") X16("\xcd") "\xcd\xcd"),
     "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
    {LIT(X16("\xaa") X16("\xaa") X16("\xaa") X16("\xaa") X16("\xaa") X16("\xaa") X16("\xaa")
             X16("\xaa") "\xaa\xaa\xaa"),
     LIT("Test Using Larger Than Block-Size Key - Hash Key First"),
     "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
    {LIT(X16("\xaa") X16("\xaa") X16("\xaa") X16("\xaa") X16("\xaa") X16("\xaa") X16("\xaa")
             X16("\xaa") "\xaa\xaa\xaa"),
     LIT("This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
         "hashed before being used by the HMAC algorithm."),
     "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
};

static void hex(const unsigned char digest[NB_SHA256_BYTES], char text[2 * NB_SHA256_BYTES + 1]) {
    for (int i = 0; i < NB_SHA256_BYTES; i++) {
        (void)snprintf(text + 2 * i, 3, "%02x", digest[i]);
    }
}

static void digest_of(const struct vector *v, size_t piece, unsigned char digest[NB_SHA256_BYTES]) {
    struct nb_sha256 sha;
    struct nb_hmac mac;
    nb_sha256_init(&sha);
    nb_hmac_init(&mac, v->key != NULL ? v->key : "", v->key_bytes);
    for (size_t at = 0; at < v->text_bytes; at += piece) {
        size_t n = v->text_bytes - at < piece ? v->text_bytes - at : piece;
        nb_sha256_add(&sha, v->text + at, n);
        nb_hmac_add(&mac, v->text + at, n);
    }
    if (v->key != NULL) {
        nb_hmac_final(&mac, digest);
    } else {
        nb_sha256_final(&sha, digest);
    }
}

static void test_vectors(void) {
    static const size_t pieces[] = {1, 7, 55, 56, 63, 64, 65, 4096};
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        for (size_t p = 0; p < sizeof pieces / sizeof pieces[0]; p++) {
            unsigned char digest[NB_SHA256_BYTES];
            char text[2 * NB_SHA256_BYTES + 1];
            digest_of(&vectors[i], pieces[p], digest);
            hex(digest, text);
            CHECK(strcmp(text, vectors[i].digest) == 0, "vector %zu in pieces of %zu: %s", i, pieces[p], text);
        }
    }
}

static void test_a_million_bytes(void) {
    unsigned char digest[NB_SHA256_BYTES];
    char text[2 * NB_SHA256_BYTES + 1];
    char many[1000];
    struct nb_sha256 sha;
    memset(many, 'a', sizeof many);
    nb_sha256_init(&sha);
    for (int i = 0; i < 1000; i++) {
        nb_sha256_add(&sha, many, sizeof many);
    }
    nb_sha256_final(&sha, digest);
    hex(digest, text);
    CHECK(strcmp(text, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0") == 0, "%s", text);
}

static void test_equal_and_random(void) {
    unsigned char a[32];
    unsigned char b[32];
    CHECK(nb_random(a, sizeof a) == 0, "random bytes");
    memcpy(b, a, sizeof b);
    CHECK(nb_bytes_equal(a, b, sizeof a), "a copy is not equal");
    for (size_t i = 0; i < sizeof a; i++) {
        b[i] ^= 0x80;
        CHECK(!nb_bytes_equal(a, b, sizeof a), "a difference in byte %zu is not detected", i);
        b[i] ^= 0x80;
    }
    CHECK(nb_random(b, sizeof b) == 0 && !nb_bytes_equal(a, b, sizeof a), "two draws are equal");
}

int main(void) {
    test_vectors();
    test_a_million_bytes();
    test_equal_and_random();
    return 0;
}
