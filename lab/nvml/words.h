/* A scenario's line, cut into words that are taken one after the other. */
#ifndef GPULAB_WORDS_H
#define GPULAB_WORDS_H

#include "lab.h"

enum { MAX_WORDS = 128 };

struct parser {
	struct scenario *s;
	const char *path;
	int line, faults;
	char *word[MAX_WORDS];
	int words, next;
	uint64_t line_hash;
};


/* Reports a fault of the line on stderr and counts it. */
__attribute__((format(printf, 2, 3))) void fault(struct parser *p, const char *format, ...);
void cut(struct parser *p, char *line);
char *next(struct parser *p); /* NULL after the last */
bool integer(struct parser *p, const char *what, const char *text, int64_t *out);
int64_t need_integer(struct parser *p, const char *what);
int need_gpu(struct parser *p, bool any);
bool instant(struct parser *p, const char *text, int64_t *out);
bool pair(struct parser *p, char **key, char **value);

#endif
