package billing

import "strings"

// Currency is an ISO 4217 currency.
type Currency struct {
	Code string // three capital letters
	// Digits is the number of decimals of the minor unit: 0 for JPY, 2 for
	// CNY, 3 for KWD. Bills are rounded to it.
	Digits int
}

// NoCurrency is ISO 4217's code for "no currency", the default of a price book
// that does not say what its prices are in.
const NoCurrency = "XXX"

// currencyDigits lists the active codes of ISO 4217 by decimals of the minor
// unit. Codes without one there (metals, funds, testing) are left out, except
// XXX.
var currencyDigits = map[int]string{
	0: "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF",
	2: "AED AFN ALL AMD AOA ARS AUD AWG AZN BAM BBD BDT BGN BMD BND BOB BOV BRL BSD BTN BWP BYN BZD " +
		"CAD CDF CHE CHF CHW CNY COP COU CRC CUP CVE CZK DKK DOP DZD EGP ERN ETB EUR FJD FKP GBP GEL " +
		"GHS GIP GMD GTQ GYD HKD HNL HTG HUF IDR ILS INR IRR JMD KES KGS KHR KPW KYD KZT LAK LBP LKR " +
		"LRD LSL MAD MDL MGA MKD MMK MNT MOP MRU MUR MVR MWK MXN MXV MYR MZN NAD NGN NIO NOK NPR NZD " +
		"PAB PEN PGK PHP PKR PLN QAR RON RSD RUB SAR SBD SCR SDG SEK SGD SHP SLE SOS SRD SSP STN SVC " +
		"SYP SZL THB TJS TMT TOP TRY TTD TWD TZS UAH USD USN UYU UZS VED VES WST XCD XCG YER ZAR ZMW " +
		"ZWG " + NoCurrency,
	3: "BHD IQD JOD KWD LYD OMR TND",
	4: "CLF UYW",
}

var currencies = func() map[string]Currency {
	table := make(map[string]Currency)
	for digits, codes := range currencyDigits {
		for _, code := range strings.Fields(codes) {
			table[code] = Currency{Code: code, Digits: digits}
		}
	}
	return table
}()

// ParseCurrency finds an active ISO 4217 currency by its code.
func ParseCurrency(code string) (Currency, bool) {
	currency, ok := currencies[code]
	return currency, ok
}
