// Environment variables of the plugins. What is valid here is valid in netbottleneck.config, with the same meaning.
#ifndef NB_NCCL_VARIABLE_H
#define NB_NCCL_VARIABLE_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

#define NB_BLANKS " \t\n\v\f\r" // ignored around a value

// NULL: not set, or empty.
static inline const char *nb_variable(const char *name) {
    const char *text = getenv(name);
    return text != NULL && text[0] != 0 ? text : NULL;
}

// Fails with -EINVAL, naming the variable and its value.
static inline int nb_variable_invalid(const char *name, const char *expected, struct nb_error *err) {
    return nb_fail(err, -EINVAL, "%s='%.80s' is not possible: expected %s", name, getenv(name), expected);
}

// Reads a decimal number from low to high; `value` keeps its own if the variable is not set. Errors: -EINVAL.
static inline int nb_variable_number(const char *name, long low, long high, long *value, struct nb_error *err) {
    const char *text = nb_variable(name);
    char *end = NULL;
    if (text == NULL) {
        return 0;
    }
    errno = 0;
    long parsed = strtol(text, &end, 10);
    if (errno != 0 || end == text || end[strspn(end, NB_BLANKS)] != 0 || parsed < low || parsed > high) {
        char expected[64];
        snprintf(expected, sizeof expected, "a whole number, %ld to %ld", low, high);
        return nb_variable_invalid(name, expected, err);
    }
    *value = parsed;
    return 0;
}

#endif
