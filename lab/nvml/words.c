#include "words.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

void fault(struct parser *p, const char *format, ...)
{
	va_list args;
	fprintf(stderr, "gpulab: %s:%d: ", p->path, p->line);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	p->faults++;
}

/* Cuts a line into words in place. Double quotes keep blanks; inside them
 * \" \\ \n and \xNN stand for what they do in C, so that a name can hold any
 * byte a driver was ever seen to answer. */
void cut(struct parser *p, char *line)
{
	p->words = p->next = 0;
	char *in = line;
	for (;;) {
		while (isspace((unsigned char)*in))
			in++;
		if (!*in || *in == '#')
			return;
		if (p->words == MAX_WORDS) {
			fault(p, "more than %d words on a line", MAX_WORDS);
			return;
		}
		char *out = p->word[p->words++] = in;
		bool quoted = false;
		char end;
		for (; *in && (quoted || !isspace((unsigned char)*in)); in++) {
			if (*in == '"') {
				quoted = !quoted;
				continue;
			}
			if (quoted && *in == '\\' && in[1]) {
				in++;
				if (*in == 'n')
					*out++ = '\n';
				else if (*in == 'x' && isxdigit((unsigned char)in[1]) && isxdigit((unsigned char)in[2])) {
					char hex[3] = {in[1], in[2], 0};
					*out++ = (char)strtol(hex, NULL, 16);
					in += 2;
				} else
					*out++ = *in;
				continue;
			}
			*out++ = *in;
		}
		end = *in;
		if (quoted)
			fault(p, "a quote is not closed");
		*out = 0;
		if (!end)
			return;
		in++;
	}
}

char *next(struct parser *p) { return p->next < p->words ? p->word[p->next++] : NULL; }

bool integer(struct parser *p, const char *what, const char *text, int64_t *out)
{
	char *end;
	errno = 0;
	int64_t n = strtoll(text ? text : "", &end, 0);
	if (!text || !*text || *end || errno) {
		fault(p, "%s: \"%s\" is not a number", what, text ? text : "");
		return false;
	}
	*out = n;
	return true;
}

int64_t need_integer(struct parser *p, const char *what)
{
	int64_t n = 0;
	integer(p, what, next(p), &n);
	return n;
}

/* A GPU number; `any` allows -1. */
int need_gpu(struct parser *p, bool any)
{
	int64_t n = need_integer(p, "GPU");
	if (n >= (any ? -1 : 0) && n < MAX_GPUS)
		return (int)n;
	fault(p, "GPU %" PRId64 " is not in %d…%d", n, any ? -1 : 0, MAX_GPUS - 1);
	return 0;
}

/* +1.5s, +200ms, +3m, +2h (after the epoch) or UNIX_SECONDS. */
bool instant(struct parser *p, const char *text, int64_t *out)
{
	char *end;
	bool relative = text && *text == '+';
	long double n = strtold(text ? text + relative : "", &end);
	bool ok = text && end != text + relative && isfinite(n) && n >= 0;
	if (relative) {
		if (!strcmp(end, "s")) n *= 1e6L;
		else if (!strcmp(end, "ms")) n *= 1e3L;
		else if (!strcmp(end, "us")) ;
		else if (!strcmp(end, "m")) n *= 60e6L;
		else if (!strcmp(end, "h")) n *= 3600e6L;
		else ok = false;
	} else {
		n *= 1e6L;
		ok = ok && !*end;
	}
	if (!ok || n > 9e18L) {
		fault(p, "\"%s\" is not a time: +SECONDSs after the epoch (also us, ms, m, h), or UNIX_SECONDS", text ? text : "");
		return false;
	}
	*out = llrintl(n) + (relative ? p->s->epoch_us : 0);
	return true;
}

/* Splits KEY=VALUE at the next word. */
bool pair(struct parser *p, char **key, char **value)
{
	char *word = next(p);
	if (!word)
		return false;
	char *equals = strchr(word, '=');
	if (!equals) {
		fault(p, "\"%s\" is not KEY=VALUE", word);
		return pair(p, key, value);
	}
	*equals = 0;
	*key = word;
	*value = equals + 1;
	return true;
}
