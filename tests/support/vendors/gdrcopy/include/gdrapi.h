#define GDR_API_MAJOR_VERSION 2
#define GDR_API_MINOR_VERSION 5
int gdr_open(void);
